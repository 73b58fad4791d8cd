"""Reads keys of a model's JSON files, with errors that name the file and the key; tables of supported keys."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from hepti_mqtt.core.errors import ModelError, UnsupportedModelError
from hepti_mqtt.core.spec import Activation

ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


_MOST_LABELS_PER_NAME: Final = 4  # with more gaps in id2label, one of its numbers is taken for a mistake


# Values of `layer_types`: layers that attend to all tokens, and layers with a window.
FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"


class KeyTable(NamedTuple):
    """The supported keys of a JSON file; `JsonConfig.check_keys` refuses others."""

    #: Keys with any value: the code reads them.
    read: frozenset[str]
    #: Keys with any value: they have no effect on answers.
    without_effect: frozenset[str] = frozenset()
    #: Supported values of further keys; null is always supported.
    only: Mapping[str, tuple[Any, ...]] = {}
    #: Keys outside this table are refused; if False, they are ignored, as by the library that wrote the file.
    closed: bool = True


_ATTENTION_KEYS: Final = frozenset(
    {"num_attention_heads", "attention_bias", "attention_dropout", "rope_parameters", "rope_scaling", "rope_theta"}
    | {"_attn_implementation", "attn_implementation"}
)
_ROPE_KEYS: Final = KeyTable(
    read=frozenset({"rope_theta"}),
    only={"rope_type": ("default",), "type": ("default",), "partial_rotary_factor": (1.0, 1)},
)


class JsonConfig:
    """One JSON object of a model directory; every read checks the type and raises ModelError."""

    def __init__(self, file: str, data: Any) -> None:
        if not isinstance(data, Mapping):
            raise ModelError(f"{file}: expected a JSON object, got {type(data).__name__}; restore the file")
        self.file = file
        self.data: Mapping[str, Any] = data

    def get(self, key: str, default: Any) -> Any:
        """Return the value, or `default` if the key is missing or null."""
        value = self.data.get(key)
        return default if value is None else value

    def require(self, key: str) -> Any:
        """Return the value; raise ModelError if the key is missing or null."""
        value = self.data.get(key)
        if value is None:
            raise ModelError(f"{self.file}: key {key!r} is missing; restore the file as the model was published")
        return value

    def renamed(self, names: Mapping[str, str]) -> JsonConfig:
        """Return this file with other names of keys replaced; names: the key that is read, by its other name.

        Raises ModelError if both names are present with different values.
        """
        data = dict(self.data)
        for other, key in names.items():
            value = data.pop(other, None)
            if value is not None and data.setdefault(key, value) != value:
                raise ModelError(f"{self.file}: {other} {value!r} and {key} {data[key]!r} are the same; remove one")
        return JsonConfig(self.file, data)

    def bad_value(self, key: str, want: str, value: Any) -> ModelError:
        """Return the error for a wrong value."""
        return ModelError(f"{self.file}: {key!r} must be {want}, got {value!r}")

    def positive(self, key: str, default: int | None = None) -> int:
        """Return an integer >= 1."""
        return self.whole(key, default, 1)

    def whole(self, key: str, default: int | None = None, least: int = 0) -> int:
        """Return an integer >= `least`."""
        value = self.require(key) if default is None else self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.bad_value(key, f"an integer >= {least}", value)
        return value

    def number(self, key: str, default: float) -> float:
        """Return a finite number > 0."""
        value = self.get(key, default)
        if not _is_number(value) or value <= 0:
            raise self.bad_value(key, "a number > 0", value)
        return float(value)

    def at_least_zero(self, key: str, default: float) -> float:
        """Return a finite number >= 0."""
        value = self.get(key, default)
        if not _is_number(value) or value < 0:
            raise self.bad_value(key, "a number >= 0", value)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.bad_value(key, "true or false", value)
        return value

    def per_channel(self, key: str, channels: int) -> tuple[float, ...]:
        """Return one finite number per channel; a single number applies to all channels."""
        value = self.require(key)
        values = [value] * channels if _is_number(value) else value
        if not isinstance(values, Sequence) or len(values) != channels or not all(map(_is_number, values)):
            raise self.bad_value(key, f"{channels} numbers", value)
        return tuple(float(v) for v in values)

    def square(self, key: str) -> int:
        """Return the side of a square that is given as one integer or as two equal ones."""
        value = self.require(key)
        if isinstance(value, Sequence) and len(value) == 2 and value[0] == value[1]:
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.bad_value(key, "an integer >= 1 (only square images and patches are supported)", value)
        return value

    def activation(self, key: str = "hidden_act", default: str | None = None) -> Activation:
        """Return the activation of the MLP; raise UnsupportedModelError for an unsupported one."""
        value = self.require(key) if default is None else self.get(key, default)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise UnsupportedModelError(
                f"{self.file}: {key} {value!r} is not supported; supported: {', '.join(ACTIVATIONS)}"
            )
        return ACTIVATIONS[value]

    def labels(self) -> tuple[str, ...]:
        """Return the names of the classes in order; LABEL_0, LABEL_1, ... if the file has none."""
        named = self.get("id2label", None)
        if named is None:
            return tuple(f"LABEL_{i}" for i in range(self.positive("num_labels", 2)))
        if not isinstance(named, Mapping) or not named:
            raise self.bad_value("id2label", "an object of numbers and names", named)
        numbers = {int(k): str(v) for k, v in named.items() if str(k).isdecimal()}
        # The weights have an output for each number up to the largest, also for numbers without a name.
        count = max(1 + max(numbers, default=0), self.positive("num_labels", 1))
        if len(numbers) < len(named) or count > _MOST_LABELS_PER_NAME * len(named):
            raise self.bad_value("id2label", "an object of numbers from 0 and names", [*named][:8])
        return tuple(numbers.get(i, f"LABEL_{i}") for i in range(count))

    def check_keys(self, table: KeyTable) -> None:
        """Raise UnsupportedModelError for keys that may change answers and are not supported."""
        for key, value in self.data.items():
            if value is None or key in table.read or key in table.without_effect:
                continue
            if key in table.only:
                # Types are compared too, because 1 equals true and 0 equals false.
                is_supported = any(value == v and type(value) is type(v) for v in table.only[key])
                why = f"only {', '.join(map(repr, table.only[key]))} is" if table.only[key] else "it is not"
            else:
                is_supported = not table.closed
                why = "its meaning is not"
            if not is_supported:
                raise UnsupportedModelError(
                    f"{self.file}: {key} {_short(value)} may change answers, and {why} supported; use a model without "
                    "it, or remove the key if it does not matter"
                )

    def heads(self, hidden: int, key: str = "num_attention_heads", of: str = "hidden_size") -> int:
        """Return the number of attention heads, which must divide `hidden`."""
        heads = self.positive(key)
        if hidden % heads:
            raise ModelError(f"{self.file}: {key} {heads} does not divide {of} {hidden}")
        return heads

    def rope_theta(self, default: float, key: str = "rope_theta", kind: str = "") -> float:
        """Return the base of rotary positions; raise UnsupportedModelError for scaled positions.

        key: of the base outside `rope_parameters`. kind: `FULL` or `SLIDING`, if these layers have different bases.
        """
        parts = self.get("rope_parameters", {})
        for place in ("rope_parameters", "rope_scaling"):
            if not isinstance(part := self.get(place, {}), Mapping):
                raise self.bad_value(place, "an object", part)
        parts = parts.get(kind) or {} if kind and kind in (parts or {}) else parts
        rope = JsonConfig(f"{self.file}: rope_parameters", parts)
        rope.check_keys(_ROPE_KEYS)
        JsonConfig(f"{self.file}: rope_scaling", self.get("rope_scaling", {})).check_keys(_ROPE_KEYS)
        return rope.number("rope_theta", self.number(key, default))

    def refuse_unknown_attention(self, *others: str) -> None:
        """Raise UnsupportedModelError for unsupported keys of attention and positions; others: supported keys."""
        for key, value in self.data.items():
            about = any(word in key for word in ("attention", "attn", "causal", "window", "rope", "rotary"))
            if about and value is not None and key not in _ATTENTION_KEYS and key not in others:
                raise UnsupportedModelError(
                    f"{self.file}: {key} {_short(value)} may change attention, and its meaning is not supported; use a "
                    "model without it, or remove the key if it does not matter"
                )

    def layer_kinds(self, layers: int, is_full: Callable[[int], bool]) -> tuple[bool, ...]:
        """Return whether each layer attends to all tokens: by `layer_types`, or `is_full` of its index without it."""
        named = self.get("layer_types", None)
        if named is None:
            return tuple(is_full(i) for i in range(layers))
        if not isinstance(named, list) or len(named) < layers or not set(named) <= {FULL, SLIDING}:
            raise self.bad_value("layer_types", f"a list of {layers} of {FULL} and {SLIDING}", named)
        return tuple(name == FULL for name in named[:layers])

    def require_one_of(self, key: str, default: Any, *supported: Any) -> None:
        """Raise UnsupportedModelError unless the value is one of `supported`."""
        value = self.get(key, default)
        if value not in supported:
            raise UnsupportedModelError(
                f"{self.file}: {key} {value!r} is not supported; supported: {', '.join(map(repr, supported))}"
            )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_number(value: Any) -> bool:
    # Compared, not converted: an integer may be too large for a float.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
