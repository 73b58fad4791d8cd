"""What it costs to build Programs for a request shape not seen before: BERT-Large over four devices, per method.

Run by hand: `make bench-building`. To compare revisions, run this file on each in turn, several times, at high priority
on one core: `chrt -r 50 taskset -c 1 env PYTHONPATH=REVISION PYTHON tests/benchmarks/building.py`, where REVISION is a
work tree of it (`git worktree add --detach REVISION d2ff7da` is that before graphs and layouts). It prints JSON: minima
of many rounds in ms of processor time, and µs per op of the Program that is built.

prepared: as a device builds that has prepared the plan, so that what only depends on the plan is there. cold: as the
first thing that a process does, without anything kept. lower: one device's Program. bind: and its kernels bound to
weights. all: the Programs of all devices.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any

import numpy as np

from hepti_mqtt import models
from hepti_mqtt.ids import Epoch
from hepti_mqtt.kernels import Weight, Workers, allocate
from hepti_mqtt.models.shapes import PackedTokens
from hepti_mqtt.plan import Plan
from hepti_mqtt.program import Program, WeightRef

try:
    from hepti_mqtt.plan_programs import make_plan, program, resident_weights
except ImportError:  # before methods were tables
    from hepti_mqtt.strategies import make_plan, program, resident_weights  # type: ignore[attr-defined,no-redef]

try:
    from hepti_mqtt.runtime.worker.executor import bind
except ImportError:  # before the runtime had two halves
    from hepti_mqtt.runtime.executor import bind  # type: ignore[import-not-found,no-redef]

METHODS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "row/kv": ("row", {"variant": "kv"}),
    "row/heads": ("row", {"variant": "heads"}),
    "column": ("column", {}),
    "block": ("block", {}),
    "single": ("single", {}),
}
LENGTHS = tuple(range(97, 129))  # each round takes another one
LARGE = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "num_hidden_layers": 24,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
    "type_vocab_size": 2,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
}


def caches() -> Iterator[Any]:
    """Yield what this revision keeps of graphs and Programs."""
    names = (
        "hepti_mqtt.lowering",
        "hepti_mqtt.plan_programs",
        "hepti_mqtt.shares",
        "hepti_mqtt.lowering.passes",
        "hepti_mqtt.models.families",
    )
    for name, module in list(sys.modules.items()):
        if name.startswith(names):
            found = (value for value in vars(module).values() if hasattr(value, "cache_clear"))
            yield from (f for f in found if f.__name__ not in ("tensor_sources", "_whole_refs"))


def shared_weights(refs: Iterable[WeightRef], made: dict[WeightRef, Weight]) -> dict[WeightRef, Weight]:
    """Return zeros for weight ranges, the same ones for all layers."""
    held = {}
    for ref in refs:
        alike = ref._replace(tensor=re.sub(r"^layers\.\d+\.", "", ref.tensor))
        if alike not in made:
            buffer = allocate(ref)
            (top, bottom), (left, right) = ref.rows, ref.columns
            buffer.put(np.zeros((bottom - top, right - left), np.float32), top, left)
            made[alike] = buffer.finish()
        held[ref] = made[alike]
    return held


class Case:
    """A method on BERT-Large, and the least times seen."""

    def __init__(self, name: str) -> None:
        strategy, options = METHODS[name]
        self.name = name
        self.spec = models.spec_from_config(LARGE, {})
        devices = ("d0",) if name == "single" else ("d0", "d1", "d2", "d3")
        template = Plan("m", Epoch(1, 1), strategy, devices, "d0")
        self.plan = make_plan(self.spec, template, strategy, options, (1.0,) * len(devices))
        self.device = devices[-2:][0]  # not the head device, where there is another
        self.best: dict[str, float] = {}
        shape = PackedTokens((LENGTHS[0],))
        built = program(self.spec, self.plan, shape, self.device)
        self.ops = len(built.ops)
        self.weights = shared_weights(built.weights(), {})
        self.workers = Workers(1)

    def build(self, shape: PackedTokens) -> Program:
        """Return one device's Program."""
        return program(self.spec, self.plan, shape, self.device)

    def round(self, shape: PackedTokens) -> None:
        """Time everything once."""
        found = list(caches())

        def forget() -> None:
            for cache in found:
                cache.cache_clear()

        def prepare() -> None:
            forget()
            for device in self.plan.devices:
                resident_weights(self.spec, self.plan, device)
            self.build(PackedTokens((512,)))
            self.build(PackedTokens((64,)))

        def bound() -> None:
            bind(self.build(shape), self.weights, self.workers)

        def everyone() -> None:
            for device in self.plan.devices:
                program(self.spec, self.plan, shape, device)

        for state, before in (("prepared", prepare), ("cold", forget)):
            for what, work in (("lower", lambda: self.build(shape)), ("bind", bound), ("all", everyone)):
                before()
                self.note(f"{state}_{what}", work)

    def note(self, what: str, work: Callable[[], Any]) -> None:
        """Time one thing."""
        started = time.thread_time()
        work()
        self.best[what] = min(self.best.get(what, 1e9), time.thread_time() - started)

    def result(self) -> dict[str, Any]:
        """Return the figures."""
        times = {what: round(seconds * 1e3, 2) for what, seconds in self.best.items()}
        per_op = {f"{w}_us_per_op": round(self.best[w] / self.ops * 1e6, 2) for w in ("prepared_lower", "cold_lower")}
        return {"ops": self.ops, **times, **per_op}


def main() -> None:
    """Print the figures of every method, with the machine."""
    cases = [Case(name) for name in METHODS]
    gc.collect()
    gc.freeze()  # what a collection costs is what it costs for the Programs
    for n in range(int(os.environ.get("ROUNDS", "40"))):
        for case in cases:
            case.round(PackedTokens((LENGTHS[n % len(LENGTHS)],)))
    result: dict[str, Any] = {case.name: case.result() for case in cases}
    result["machine"], result["python"] = platform.machine(), platform.python_version()
    result["package"] = import_module("hepti_mqtt").__file__
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
