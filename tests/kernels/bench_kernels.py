"""Times kernels against NumPy on one thread, by hand: OPENBLAS_NUM_THREADS=1 python tests/kernels/bench_kernels.py.

Every case is checked first, then warmed, then both sides alternate; medians. The machine drifts, ratios hold.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import numpy as np
from kernels_support import Case, array, poisoned, pool

from hepti_mqtt.kernels import isa

Plain = Callable[[], object]


def linear(m: int, k: int, n: int, activation: str | None = None) -> tuple[str, Case, Plain, float]:
    x, w, b = array(m, k), array(k, n, scale=0.05), array(n)
    case = Case("linear", [x], [(m, n)], [w, b], packed=1, bias=True, activation=activation, residual=False)
    return f"linear {m}x{k}x{n} {activation or ''}", case, lambda: x @ w, 2.0 * m * k * n


def attention(m: int, heads: int, d: int, lengths: tuple[int, ...]) -> tuple[str, Case, Plain, float]:
    x, h = array(m, 3 * heads * d), heads * d
    case = Case(
        "attention",
        [x, x],
        [(m, h)],
        q_column=0,
        k_column=h,
        v_column=2 * h,
        heads=heads,
        head_dim=d,
        q_rows=range(m),
        k_rows=((0, m),),
        lengths=lengths,
        scale=d**-0.5,
    )
    q, k, v = (
        np.ascontiguousarray(x[:, i * h : (i + 1) * h].reshape(m, heads, d).transpose(1, 0, 2)) for i in range(3)
    )

    def plain() -> object:
        s = q @ k.transpose(0, 2, 1) * np.float32(d**-0.5)
        e = np.exp(s - s.max(axis=2, keepdims=True))
        return (e / e.sum(axis=2, keepdims=True)) @ v

    return f"attention {lengths[:2]} heads {heads} d {d}", case, plain, sum(4.0 * n * n * h for n in lengths)


def norm(m: int, h: int, parts: int) -> tuple[str, Case, Plain, float]:
    reads = [array(m, h) for _ in range(1 + parts)]
    attrs = {"bias": False, "eps": 1e-5, "keep_sum": False}
    case = Case("add_norm", reads, [(m, h)], [array(h), array(h)], **attrs)

    def plain() -> object:
        t = sum(reads[1:], reads[0])
        c = t - t.mean(axis=1, keepdims=True)
        return c / np.sqrt((c * c).mean(axis=1, keepdims=True) + 1e-5)

    return f"add_norm {m}x{h} of {parts}", case, plain, 8.0 * m * h


def codec(kernel: str, m: int, n: int, dtype: str, width: int) -> tuple[str, Case, Plain, float]:
    x = array(m, n)
    return f"{kernel} {m}x{n}", Case(kernel, [x], [(m, width)], dtype=dtype), lambda: x.astype(np.float16), float(m * n)


def cases() -> Iterator[tuple[str, Case, Plain, float]]:
    for shape in (
        (384, 1024, 1024),
        (384, 1024, 4096),
        (384, 4096, 1024),
        (128, 1024, 1024),
        (128, 1024, 3072),
        (48, 1024, 256),
        (32, 1024, 1024),
        (17, 1024, 1024),
        (8, 1024, 1024),
        (4, 1024, 1024),
        (3, 1024, 1024),
        (2, 1024, 1024),
        (1, 1024, 1024),
        (1, 1024, 4096),
        (5, 384, 384),
        (128, 384, 1536),
    ):
        yield linear(*shape)
    yield linear(128, 1024, 4096, "gelu")
    yield linear(128, 384, 1536, "gelu")
    yield linear(128, 384, 1536, "gelu_tanh")
    for m, d in ((128, 64), (128, 32), (384, 64), (512, 64), (16, 32), (40, 64)):
        yield attention(m, 12, d, (m,))
    yield attention(160, 12, 32, (20,) * 8)
    yield norm(128, 1024, 1)
    yield norm(128, 1024, 4)
    yield codec("to_f16", 128, 1024, "f16", 1024)
    yield codec("to_i8", 128, 1024, "i8", 1028)


def clock(function: Callable[[], object], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        function()
    return (time.perf_counter() - start) / times


def main(wanted: list[str]) -> None:
    print(f"{isa()}; GF/s = flops (or values) / time / 1e9")
    for name, case, plain, flops in cases():
        if wanted and not any(w in name for w in wanted):
            continue
        case.check(rtol=1e-3, atol=1e-3)
        with pool(1) as workers:
            run = case.kernel.bind(case.op, case.slots, case.weights, workers)
        writes = [poisoned(case.slots[s]) for s in case.op.writes]
        ours_once = partial(run, case.reads, writes)
        times = max(1, int(2e-3 / clock(ours_once, 3)))
        rounds = [(clock(ours_once, times), clock(plain, times)) for _ in range(15)]
        ours, theirs = (median(side) for side in zip(*rounds, strict=True))
        print(
            f"{name:34} {ours * 1e6:9.1f} us {flops / ours / 1e9:7.1f} GF/s   "
            f"NumPy {theirs * 1e6:9.1f} us {flops / theirs / 1e9:7.1f}   x{theirs / ours:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
