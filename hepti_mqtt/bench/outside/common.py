"""What every outside baseline shares: its options, the model and input as NumPy has them, and the talk with its runner.

A baseline loads, computes once, says {"ready": true, "difference": D, "versions": {...}} (D: the largest difference of
its hidden states to the reference, null on ranks that have none), and then answers every line with {"latency_s": T},
one inference each. The end of its input ends it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.errors import ConfigError, HeptiError
from hepti_mqtt.models import reference
from hepti_mqtt.spec import ModelSpec, RequestShape

Array = NDArray[Any]
TORCH_HINT = "pip install torch==2.13.0, the CPU build (https://download.pytorch.org/whl/cpu)"
ONNX_HINT = "pip install 'hepti[bench]'"


@dataclass(frozen=True, slots=True)
class Options:
    """rank, world, master: of the group; a baseline of one process has world 1. variant: of the baseline, or empty."""

    model: str
    tokens: int
    seed: int
    rank: int
    world: int
    master: str
    variant: str


@dataclass(frozen=True, slots=True)
class Task:
    """A model, and one input: `values` is token ids i32 [m], or normalised patches f32 [n, channels p p]."""

    spec: ModelSpec
    tensors: Mapping[str, Array]
    raw: Array
    values: Array

    @property
    def rows(self) -> int:
        """Return m, the rows of the hidden states."""
        return len(self.values) + (self.spec.image is not None)

    def expected(self) -> Array:
        """Return the final hidden states [m, h] of the plain NumPy reference."""
        return reference(self.spec, self.tensors, self.raw, RequestShape((self.rows,), "hidden"))[0]


# A baseline: from its options and task, what computes the hidden states (None where a rank has none) and what must
# happen before the clock starts, so that all ranks begin together.
Made = tuple[Callable[[], Array | None], Callable[[], None], dict[str, str]]


def task(options: Options) -> Task:
    """Open the model and make its input from the seed; raises ModelError, ConfigError."""
    with Checkpoint.open(options.model) as checkpoint:
        spec = checkpoint.spec
        tensors = {name: np.asarray(value) for name, value in checkpoint.tensors().items()}
    rng = np.random.default_rng(options.seed)
    if spec.image is not None:
        image = spec.image
        raw = rng.integers(0, 256, (1, image.channels, image.size, image.size)).astype(np.uint8)
        return Task(spec, tensors, raw, _patches(spec, raw))
    assert spec.text is not None
    if not 0 < options.tokens <= spec.max_tokens:
        raise ConfigError(f"{options.tokens} tokens do not fit {options.model}: use 1 to {spec.max_tokens}")
    raw = rng.integers(0, spec.text.vocab, options.tokens).astype(np.int32)
    return Task(spec, tensors, raw, raw)


def _patches(spec: ModelSpec, pixels: Array) -> Array:
    image = spec.image
    assert image is not None
    mean, std = (np.array(v, np.float32)[:, None, None] for v in (image.mean, image.std))
    values = (pixels[0].astype(np.float32) / 255 - mean) / std
    p, side = image.patch, image.size // image.patch
    blocks = values.reshape(image.channels, side, p, side, p).transpose(1, 3, 0, 2, 4)
    return np.ascontiguousarray(blocks.reshape(image.patches, -1))


def main(make: Callable[[Options, Task], Made], arguments: Sequence[str]) -> int:
    """Run a baseline until its input ends; return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="a Hugging Face directory")
    parser.add_argument("--tokens", type=int, default=128, help="of a text; images have their own number")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--master", default="127.0.0.1:29500", help="address:port of rank 0")
    parser.add_argument("--variant", default="")
    options = Options(**vars(parser.parse_args(arguments)))
    try:
        _serve(options, make)
    except HeptiError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _serve(options: Options, make: Callable[[Options, Task], Made]) -> None:
    given = task(options)
    compute, together, versions = make(options, given)
    output = compute()
    difference = None if output is None else float(np.abs(output - given.expected()).max())
    together()
    print(json.dumps({"ready": True, "difference": difference, "versions": versions}), flush=True)
    for _ in sys.stdin:
        together()
        begin = time.perf_counter()
        compute()
        print(json.dumps({"latency_s": time.perf_counter() - begin}), flush=True)
