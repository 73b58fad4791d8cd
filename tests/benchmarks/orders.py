"""Keys, values and attention of `voltage` in both orders of the products, on one device's part of an encoder's layers.

Run by hand, alone on the machine: `python tests/benchmarks/orders.py [THREADS]`. The ops are those of real Programs: of
one of N equal devices, with each layer's own weights, which come from memory. Both orders take turns, layer by layer.
Prints medians over layers and rounds, beside what multiplications and this machine's measured curves say.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from sites import plan

from device_agent.measure import measure
from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.cost.profiles import profile_from_caps
from hepti_mqtt.kernels import KERNELS, Workers, allocate, isa, works
from hepti_mqtt.models.shapes import PackedTokens
from hepti_mqtt.plan_programs import program
from hepti_mqtt.program import Compute

CASES = [("bert-large", n, m) for n, m in ((4, 32), (4, 64), (4, 128), (4, 192), (4, 256), (8, 128), (2, 64))]
CASES += [("bert-base", 4, 64), ("bert-base", 4, 128)]
ORDERS = ("kept", "reordered")
LAYERS, ROUNDS = 6, 15


class Ops:
    """The ops of each layer that make queries, keys, values and attention of them; weights: shared by both orders."""

    def __init__(self, spec, devices, tokens, order, workers, weights):
        fixed = plan(spec, ("voltage", {"shares": "equal", "order": order}), (1.0,) * devices)
        self.program = program(spec, fixed, PackedTokens((tokens,), "hidden"), "d1")
        rng = np.random.default_rng(1)
        self.arrays = {}
        self.layers = []
        for layer in range(1, spec.layers):  # the first one gets its rows from the stem
            named = (f"{layer}.qkv", f"{layer}.attention")
            ops = [op for op in self.program.ops if isinstance(op, Compute) and self.program.node(op.node) in named]
            self.layers.append([(op, self.bound(op, workers, weights, rng)) for op in ops])

    def bound(self, op, workers, weights, rng):
        for ref in op.weights:
            if ref not in weights:
                (top, bottom), (left, right) = ref.rows, ref.columns
                buffer = allocate(ref)
                values = rng.standard_normal((bottom - top, right - left), np.float32) * 0.03
                buffer.put(values, top, left)
                weights[ref] = buffer.finish()
        run = KERNELS[op.kernel].bind(op, self.program.slots, [weights[ref] for ref in op.weights], workers)
        reads, writes = ([self.array(slot, rng) for slot in slots] for slots in (op.reads, op.writes))
        return lambda: run(reads, writes)

    def array(self, slot, rng):
        spec = self.program.slots[slot]
        if spec.base is not None:
            return self.array(spec.base, rng)[spec.start :][: spec.shape[0]].reshape(spec.shape)
        if slot not in self.arrays:
            self.arrays[slot] = rng.standard_normal(spec.shape, np.float32)
        return self.arrays[slot]

    def works(self):
        return [works(op, self.program.slots) for op, _ in self.layers[0]]


def main() -> None:
    """Print a markdown table."""
    threads = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    workers = Workers(threads)
    profile = profile_from_caps("here", measure(workers, 1 << 30, narrow=False), 1 << 30, 1.0)
    print(f"{isa()}, {threads} threads; ms per layer\n")
    print("| model | N | m | kept | reordered | ratio | of multiplications | as priced |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for kind, devices, tokens in CASES:
        spec, weights = replace(spec_of_kind(kind), layers=LAYERS), {}
        found = [Ops(spec, devices, tokens, order, workers, weights) for order in ORDERS]
        times = [[], []]
        for _ in range(ROUNDS):
            for layers in zip(*(ops.layers for ops in found), strict=True):
                for order, ops in enumerate(layers):
                    start = perf_counter()
                    for _, run in ops:
                        run()
                    times[order].append(perf_counter() - start)
        counted = [sum(work.flops for work in chain(*ops.works())) for ops in found]
        priced = [sum(profile.seconds(*work) for work in ops.works()) for ops in found]
        kept, other = map(median, times)
        ratios = [other / kept, counted[1] / counted[0], priced[1] / priced[0]]
        cells = [kind, devices, tokens, f"{kept * 1e3:.2f}", f"{other * 1e3:.2f}", *(f"{r:.2f}" for r in ratios)]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    workers.close()


if __name__ == "__main__":
    main()
