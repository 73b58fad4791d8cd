"""A program: run kernels while other threads allocate from the same heap; print what was written into their memory.

Its own process, since every thread must share one heap (MALLOC_ARENA_MAX=1), and damage may end it.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable

from kernels_support import poisoned, pool
from test_kernels_attention import attention
from test_kernels_gemm import linear

SIZES = (40, 56, 100, 500, 3000, 20_000, 40_000, 90_000)
SECONDS = 0.25
KEPT = 60
K, N = 520, 520  # two blocks, the last one and the last panel ragged


def watch(stop: threading.Event, faults: list[str]) -> None:
    kept: list[bytearray] = []
    while not stop.is_set():
        kept.append(bytearray(random.choice(SIZES)))
        if len(kept) > KEPT:
            block = kept.pop(random.randrange(KEPT))
            if block.count(0) != len(block):
                faults.append(f"{len(block) - block.count(0)} of {len(block)} bytes")


def watched(name: str, run: Callable[[list, list], None], reads: list, writes: list) -> bool:
    stop, faults = threading.Event(), []
    watchers = [threading.Thread(target=watch, args=(stop, faults)) for _ in range(2)]
    for thread in watchers:
        thread.start()
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and not faults:
        run(reads, writes)
    stop.set()
    for thread in watchers:
        thread.join()
    if faults:
        print(f"{name} wrote to memory that is not its own: {faults[0]}")
    return not faults


def main() -> int:
    sys.setswitchinterval(1e-4)
    good = True
    with pool(2) as workers:
        cases = {
            f"linear {storage}, {m} rows": linear(storage, m, K, [N], bias=False, activation="relu")
            for storage in ("f32", "f16", "w8a32", "w8a8")
            for m in (2, 40)
        }
        cases["attention"] = attention((64,), 8, 64)
        for name, case in cases.items():
            run = case.kernel.bind(case.op, case.slots, case.weights, workers)
            good &= watched(name, run, case.reads, [poisoned(case.slots[s]) for s in case.op.writes])
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
