"""`python -m benchmarks.outside.worker ADDRESS`: an outside baseline's process on a host; speaks JSON lines.

stdin: {"do": "port"}, {"do": "load", "module", "variant", "packed", "rank", "world", "master", "model", "body",
"reference" (a .npy, null on all ranks but the first)}, {"do": "check"}, {"do": "measure"}, {"do": "drop"}. stdout: one
line for each, {"ok": true, ...} or {"ok": false, "code", "message"}. Between two lines it waits in a read and takes no
time of its host. ADDRESS: the host's, by which gloo finds the network interface.

A baseline is a module here whose `make` returns what computes the hidden states.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks.errors import BenchError
from benchmarks.outside import relative_error
from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.core.errors import HeptiError
from hepti_mqtt.models import require_transformer
from hepti_mqtt.models.transformer import ModelSpec
from hepti_mqtt.service.requests import read_input

Array = NDArray[Any]
FAMILIES: Final = ("bert", "vit")  # whose layers the baselines compute


@dataclass(frozen=True, slots=True)
class Options:
    """rank, world, master: of the group; a baseline of one process has world 1. variant: of the baseline, or empty.

    packed: weights in the layout of the library that multiplies.
    """

    rank: int = 0
    world: int = 1
    master: str = ""
    variant: str = ""
    packed: bool = False


@dataclass(frozen=True, slots=True)
class Task:
    """A model, and one input: `values` is token ids i32 [m], or normalised patches f32 [n, channels p p].

    tensors: read when asked for and not kept, so that a host holds a weight once.
    """

    spec: ModelSpec
    tensors: Mapping[str, Array]
    values: Array

    @property
    def rows(self) -> int:
        """Return m, the rows of the hidden states."""
        return len(self.values) + (self.spec.image is not None)


class Made(NamedTuple):
    """compute: the hidden states, None where a rank has none. together: returns when every rank has called it.

    leave: ends the rank's part in the group.
    """

    compute: Callable[[], Array | None]
    versions: dict[str, str]
    together: Callable[[], None] = lambda: None
    leave: Callable[[], None] = lambda: None


def task_of(checkpoint: Checkpoint, body: Mapping[str, Any]) -> Task:
    """Return the task of a request as Hepti reads it; raises RequestError, BenchError for another family."""
    inputs = read_input(checkpoint, {**body, "want": "hidden"}).inputs
    spec = require_transformer(checkpoint.spec)
    if spec.family not in FAMILIES:
        raise BenchError(f"outside baselines do not compute {spec.architecture}; supported: {', '.join(FAMILIES)}")
    return Task(spec, checkpoint.tensors(), inputs if spec.image is None else _patches(spec, inputs))


def _patches(spec: ModelSpec, pixels: Array) -> Array:
    image = spec.image
    assert image is not None
    mean, std = (np.array(v, np.float32)[:, None, None] for v in (image.mean, image.std))
    values = (pixels[0].astype(np.float32) / 255 - mean) / std
    p, side = image.patch, image.size // image.patch
    blocks = values.reshape(image.channels, side, p, side, p).transpose(1, 3, 0, 2, 4)
    return np.ascontiguousarray(blocks.reshape(image.patches, -1))


class Worker:
    """At most one baseline with its weights; the library stays imported between two of them."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._made: Made
        self._expected: Array | None = None

    def port(self, _: Mapping[str, Any]) -> dict[str, Any]:
        """Return a free port of this host."""
        with socket.create_server((self._address, 0)) as server:
            return {"port": server.getsockname()[1]}

    def load(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Read the weights and join the group; raises ConfigError for a missing package."""
        module = importlib.import_module(f"benchmarks.outside.{order['module']}")
        options = Options(order["rank"], order["world"], order["master"], order["variant"], order["packed"])
        with Checkpoint.open(order["model"]) as checkpoint:
            self._made = module.make(options, task_of(checkpoint, order["body"]))
        self._expected = None if order["reference"] is None else np.load(order["reference"])
        return {"versions": self._made.versions}

    def check(self, _: Mapping[str, Any]) -> dict[str, Any]:
        """Compute once; return the relative error of the hidden states where there is a reference, and memory held."""
        found, expected = self._made.compute(), self._expected
        error = None if found is None or expected is None else relative_error(found, expected)
        return {"error": error, "rss_bytes": psutil.Process().memory_info().rss}

    def measure(self, _: Mapping[str, Any]) -> dict[str, Any]:
        """Compute once and return how long it took, from the moment at which all ranks stand ready."""
        self._made.together()
        begin = time.perf_counter()
        self._made.compute()
        return {"latency_ms": 1e3 * (time.perf_counter() - begin)}

    def drop(self, _: Mapping[str, Any]) -> dict[str, Any]:
        """Leave the group and free the weights."""
        self._made.leave()
        del self._made
        gc.collect()
        return {}


def interface(address: str) -> str | None:
    """Return the network interface that has an address of this host, None for an address that it does not know."""
    found = psutil.net_if_addrs().items()
    return next((name for name, own in found for a in own if a.address == address), None)


def main(address: str) -> int:
    """Answer every line of stdin until it ends."""
    if (name := interface(address)) is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name  # gloo would take the one that the host's name resolves to
    worker = Worker(address)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = {"ok": True, **getattr(worker, order["do"])(order)}
        except HeptiError as error:
            answer = {"ok": False, "code": error.code, "message": str(error)}
        print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
