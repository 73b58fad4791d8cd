"""Which outside baselines there are, and what each needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Final, NamedTuple

from hepti_mqtt.errors import ConfigError


class Library(NamedTuple):
    """packages: what it imports. hint: how they are installed."""

    packages: tuple[str, ...]
    hint: str


TORCH: Final = Library(("torch",), "pip install torch==2.13.0, its CPU build")
ONNX: Final = Library(("onnx", "onnxruntime"), "pip install onnx onnxruntime")


class Baseline(NamedTuple):
    """A module below this package, its library, how many hosts it takes, its variant, and whether it packs weights."""

    module: str
    library: Library
    least: int
    most: int
    variant: str = ""
    packed: bool = False


_TORCH: Final[Mapping[str, Baseline]] = {
    "torch": Baseline("torch_single", TORCH, 1, 1),
    "torch-megatron": Baseline("torch_megatron", TORCH, 2, 16),
    "torch-tokens-x": Baseline("torch_tokens", TORCH, 2, 16, "x"),
    "torch-tokens-kv": Baseline("torch_tokens", TORCH, 2, 16, "kv"),
}
BASELINES: Final[Mapping[str, Baseline]] = {
    **_TORCH,
    **{f"{name}-packed": baseline._replace(packed=True) for name, baseline in _TORCH.items()},
    "onnxruntime": Baseline("onnx_single", ONNX, 1, 1),
}


def require(names: Sequence[str]) -> None:
    """Raise ConfigError that says how to install it if this interpreter lacks what one of the baselines imports."""
    for name in names:
        library = BASELINES[name].library
        if missing := [package for package in library.packages if find_spec(package) is None]:
            raise ConfigError(
                f"the baseline {name} needs {' and '.join(missing)}, not installed here: {library.hint}, or use the "
                "environment that `make bench-venv` makes (.cache/bench-venv); or leave it out of `outside:`"
            )
