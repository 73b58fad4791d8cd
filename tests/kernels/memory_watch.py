"""A program: run kernels while other threads allocate from the same heap; print what was written into their memory.

Its own process, since every thread must share one heap (MALLOC_ARENA_MAX=1), and damage may end it.
"""

from __future__ import annotations

import random
import sys
import threading
import time

from kernels_support import array, pool, spec

from hepti_mqtt.kernels import KERNELS, Run, Workers, allocate, warm_up
from hepti_mqtt.plan import WeightDtype
from hepti_mqtt.program import Compute, SlotSpec, WeightRef

SIZES = (40, 56, 100, 500, 3000, 20_000, 40_000, 90_000)
SECONDS = 0.25
KEPT = 60
K, N = 520, 520  # two blocks, the last one and the last panel ragged


def linear(storage: WeightDtype, m: int, workers: Workers) -> Run:
    ref = WeightRef("w", (0, K), (0, N), "packed", storage)
    buffer = allocate(ref)
    buffer.put(array(K, N), 0, 0)
    attrs = {"bias": False, "activation": "relu", "residual": False}
    return KERNELS["linear"].bind(
        Compute("linear", (0,), (1,), (ref,), attrs), (SlotSpec((m, K)), SlotSpec((m, N))), [buffer.finish()], workers
    )


def attention(rows: int, workers: Workers) -> Run:
    attrs = {
        "q_column": 0, "k_column": 512, "v_column": 1024, "heads": 8, "head_dim": 64,
        "q_rows": range(rows), "k_rows": ((0, rows),), "lengths": (rows,), "scale": 0.125,
    }  # fmt: skip
    slots = (SlotSpec((rows, 1536)), SlotSpec((rows, 512)))
    return KERNELS["attention"].bind(Compute("attention", (0, 0), (1,), (), attrs), slots, (), workers)


def watch(stop: threading.Event, found: list[str]) -> None:
    kept: list[bytearray] = []
    while not stop.is_set():
        kept.append(bytearray(random.choice(SIZES)))
        if len(kept) > KEPT:
            block = kept.pop(random.randrange(KEPT))
            if block.count(0) != len(block):
                found.append(f"{len(block) - block.count(0)} of {len(block)} bytes")


def watched(name: str, run: Run, reads: list, writes: list) -> bool:
    stop, found = threading.Event(), []
    watchers = [threading.Thread(target=watch, args=(stop, found)) for _ in range(2)]
    for thread in watchers:
        thread.start()
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and not found:
        run(reads, writes)
    stop.set()
    for thread in watchers:
        thread.join()
    if found:
        print(f"{name} wrote to memory that is not its own: {found[0]}")
    return not found


def main() -> int:
    sys.setswitchinterval(1e-4)
    warm_up()
    good = True
    with pool(2) as workers:
        for storage in ("f32", "f16", "w8a32", "w8a8"):
            for m in (2, 40):
                x, out = array(m, K), array(m, N)
                assert spec(out) == SlotSpec((m, N))
                run = linear(storage, m, workers)
                good &= watched(f"linear {storage}, {m} rows", run, [x], [out])
        qkv = array(64, 1536)
        good &= watched("attention", attention(64, workers), [qkv, qkv], [array(64, 512)])
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
