"""A Plan: the small, published record of how one model's work is divided."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, pairwise
from typing import Any, Final, Literal

from hepti_mqtt.core.ids import PlanVersion

WireDtype = Literal["f32", "f16", "i8"]
NARROW_WIRE_DTYPES: Final[tuple[WireDtype, ...]] = ("i8", "f16")  # the narrowest first
#: Storage of the layers' matrices: f32; f16 (half the memory); int8 with one scale per column, for activations that are
#: quantised per row (w8a8, integer arithmetic) or stay f32 (w8a32).
WeightDtype = Literal["f32", "f16", "w8a8", "w8a32"]
Quantised = Literal["q8", "q4"]  #: quantisation of a checkpoint's matrices when it is opened, for all plans
CacheDtype = Literal["f32", "f16"]  #: storage of a session's keys and values
Range = tuple[int, int]
#: Exchanges between devices go over the site's broker, or directly from each sender to its receivers.
Route = Literal["broker", "mesh"]
#: A plan minimises the latency of one request, the time per request of several (throughput), memory of any device.
Objective = Literal["latency", "throughput", "memory"]
DevicePair = tuple[str, str]  # (source, target)

# Keys of `Plan.to_dict` that differ from their fields' names.
KEYS: Final[Mapping[str, str]] = {
    "shares": "weights",
    "weight_dtype": "storage",
    "relayed_pairs": "relayed",
}
OPTIONAL_KEYS: Final = frozenset({"replicas", "layouts"})  # left out if empty
_FIELDS: Final = {key: name for name, key in KEYS.items()}
_UNDIVIDED: Final[Mapping[str, Any]] = {
    "version": PlanVersion(0, 0),
    "predicted_s": 0.0,
    "predicted_bytes": 0,
    "predicted_tokens": 0,
    "wire_error": None,
    "weight_error": None,
    "reason": "",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """The division of a model; each agent derives its own Program from it."""

    model: str
    version: PlanVersion
    strategy: str
    devices: tuple[str, ...]  #: in source order, the order in which partial results are combined
    root: str  #: holds the undivided parts of embedding and task head
    options: Mapping[str, str] = field(default_factory=dict)
    #: Shares that depend on a request's length: one number >= 0 per device, by kind ("rows").
    shares: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    #: Shares that do not: one half-open range per device, by kind ("heads", "mlp", "columns").
    ranges: Mapping[str, tuple[Range, ...]] = field(default_factory=dict)
    wire: WireDtype = "f32"
    weight_dtype: WeightDtype = "f32"  #: of the layers' matrices
    route: Route = "broker"
    #: (source, target) that cannot connect: their exchanges use the broker under route "mesh" too.
    relayed_pairs: tuple[DevicePair, ...] = ()
    predicted_s: float = 0.0  #: one request of `predicted_tokens` tokens by the simulator
    predicted_bytes: int = 0
    predicted_tokens: int = 0
    wire_error: float | None = None  #: deviation of the answer by a narrow wire, relative to f32; None: not measured
    weight_error: float | None = None  #: like `wire_error`, for narrow weights
    reason: str = ""
    #: Complete plans of disjoint devices, with versions of their own; each run uses one. Empty: runs use this plan.
    replicas: tuple[Plan, ...] = ()
    #: Other layouts of the method, each for runs of more rows than its number; the largest such number counts.
    layouts: Mapping[str, int] = field(default_factory=dict)

    @property
    def executables(self) -> tuple[Plan, ...]:
        """Return the plans that a run may use: the replicas, or the plan itself."""
        return self.replicas or (self,)

    def for_device(self, device: str) -> Plan:
        """Return a device's plan: its replica, or the plan itself."""
        return next((replica for replica in self.replicas if device in replica.devices), self)

    def with_version(self, plan_version: PlanVersion, next_version: Callable[[], PlanVersion]) -> Plan:
        """Return the plan under another version, and its replicas under new ones."""
        replicas = tuple(replace(replica, version=next_version()) for replica in self.replicas)
        return replace(self, version=plan_version, replicas=replicas)

    def without_device(self, device: str) -> Plan | None:
        """Return the plan without the replica of a device; None if no replica remains."""
        left = tuple(replica for replica in self.replicas if device not in replica.devices)
        devices = tuple(d for d in self.devices if any(d in replica.devices for replica in left))
        return replace(self, devices=devices, root=left[0].root, replicas=left) if left else None

    @property
    def method(self) -> str:
        """Return strategy and variant, as people write it."""
        return "/".join([self.strategy, *self.options.values()])

    @property
    def division(self) -> Plan:
        """Return the plan without fields that its Programs do not depend on: version, predictions, errors, reason."""
        return replace(self, **_UNDIVIDED)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for msgpack or JSON; `from_dict` is the inverse."""
        data = {KEYS.get(field.name, field.name): _plain(getattr(self, field.name)) for field in fields(self)}
        return {key: value for key, value in data.items() if value or key not in OPTIONAL_KEYS}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Return the plan that `to_dict` described; raises KeyError, TypeError or ValueError on other data."""
        try:
            return cls._read(data)
        except (AttributeError, OverflowError) as error:  # e.g. a list for a mapping, an infinite number in a range
            raise ValueError(f"a field of the plan has the wrong type: {error}") from error

    @classmethod
    def _read(cls, data: Mapping[str, Any]) -> Plan:
        fields = dict(data)
        boot, number = fields["version"]
        fields["version"] = PlanVersion(int(boot), int(number))
        fields["devices"] = tuple(fields["devices"])
        fields["weights"] = {k: tuple(float(w) for w in v) for k, v in fields["weights"].items()}
        fields["ranges"] = {k: tuple((int(a), int(b)) for a, b in v) for k, v in fields["ranges"].items()}
        replicas = fields.get("replicas", ())
        if any(replica.get("replicas") for replica in replicas):
            raise ValueError("a replica cannot have replicas")
        fields["replicas"] = tuple(cls.from_dict(replica) for replica in replicas)
        fields["relayed"] = tuple((source, target) for source, target in fields.get("relayed", ()))
        fields["layouts"] = {str(name): int(rows) for name, rows in fields.get("layouts", {}).items()}
        return cls(**{_FIELDS.get(key, key): value for key, value in fields.items()})


def _plain(value: Any) -> Any:
    """Return a field's value with lists in place of tuples, and dictionaries in place of mappings and replicas."""
    if isinstance(value, Plan):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def apportion(total: int, shares: Sequence[float]) -> tuple[Range, ...]:
    """Divide 0..total into consecutive half-open ranges proportional to `shares` (largest remainder method).

    A share of 0 gets an empty range. Ties go to the earlier device, so every agent derives the same ranges.
    Raises ValueError if a share is negative or none is positive.
    """
    if any(w < 0 for w in shares) or not any(w > 0 for w in shares):
        raise ValueError(f"shares must be >= 0 with one > 0, got {list(shares)}")
    whole = sum(shares)
    exact = [total * w / whole for w in shares]
    counts = [int(e) for e in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: (-(exact[i] - counts[i]), i))
    candidates = [i for i in by_remainder if shares[i] > 0]
    left = total - sum(counts)
    for place in range(left):
        counts[candidates[place % len(candidates)]] += 1
    return tuple(pairwise(accumulate(counts, initial=0)))
