"""What the interpreter costs beside the kernels: per op (bar 10 µs) and per exchange (bar 100 µs, transport excluded).

Run by hand: `make bench-overhead`. Checks the result first, then prints medians of many runs.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections import Counter

import numpy as np

from hepti_mqtt.ids import Epoch
from hepti_mqtt.kernels import Workers
from hepti_mqtt.program import Builder
from hepti_mqtt.protocol import frames
from hepti_mqtt.protocol.frames import Exchanges
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.runtime.worker import runs
from hepti_mqtt.runtime.worker.executor import Executor, bind
from hepti_mqtt.runtime.worker.runs import Run

OPS, RUNS = 400, 60
INPUT, OUTPUT, VALUE = 0, 1, 2  # nodes; a value of each exchange has one of its own, from VALUE on


def chain() -> Builder:
    """Return a Program of many tiny ops: each adds the input to what the one before yielded."""
    b = Builder("a")
    first = slot = b.recv((1, 8), "planner", INPUT)
    for _ in range(OPS):
        slot = b.compute("add", (slot, first), (1, 8), bias=False)
    b.send(slot, ("planner",), OUTPUT)
    return b


def per_op() -> tuple[float, float]:
    """Return (µs per op in all, µs of the kernel call alone)."""
    program = chain().build()
    bound = bind(program, {}, Workers(1))
    x = np.arange(8, dtype=np.float32).reshape(1, 8)
    executor = Executor()
    totals, kernels = [], []
    for run in range(RUNS):
        executor.admit(run, bound)
        executor.deliver(run, (INPUT, 0, "planner"), x)
        outgoing = None
        started = time.perf_counter()
        while (step := executor.next()) is not None:
            outgoing = step.run() or outgoing
        totals.append((time.perf_counter() - started) / OPS)
        assert outgoing is not None
        assert np.array_equal(outgoing.array, (OPS + 1) * x)
        executor.finished(run)
        op = next(o for o in bound.ops if hasattr(o, "kernels"))
        y = np.empty_like(x)
        started = time.perf_counter()
        for _ in range(OPS):
            op.kernels[0].run([x, x], [y])
        kernels.append((time.perf_counter() - started) / OPS)
        assert np.array_equal(y, 2 * x)
    return statistics.median(totals) * 1e6, statistics.median(kernels) * 1e6


def per_exchange(rows: int = 16, columns: int = 1024) -> float:
    """Return µs from a filled slot on one device to a filled slot on another: frame, bytes, checks, delivery."""
    exchanges = 50
    sender, receiver = Builder("a"), Builder("b")
    value = sender.recv((rows, columns), "planner", INPUT)
    for layer in range(exchanges):
        sender.layer = receiver.layer = layer
        sender.send(value, ("b",), VALUE + layer)
        receiver.recv((rows, columns), "a", VALUE + layer)
    session = runs.Runs("a", Topics("home"), Counter())
    x = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    times, known = [], Exchanges()
    out, into = bind(sender.build(), {}, Workers(1)), bind(receiver.build(), {}, Workers(1))
    for run in range(RUNS):
        here, there = Executor(), Executor()
        here.admit(run, out)
        there.admit(run, into)
        here.deliver(run, (INPUT, 0, "planner"), x)
        sending = Run(frames.Frame("work", "m", Epoch(1, 1), run), 0.0, frames.Session(), x, out.sends)
        started = time.perf_counter()
        while (step := here.next()) is not None:
            outgoing = step.run()
            if outgoing is not None:
                for publish in session.send(sending, outgoing):
                    payload = memoryview(publish.whole)
                    arrival = known.arrival("a", publish.topic, payload)
                    if arrival is None:  # in the first run
                        known.learn("a", publish.topic, payload, frames.decode(payload))
                        arrival = known.arrival("a", publish.topic, payload)
                    array = arrival.array()
                    assert there.deliver(run, arrival.exchange.key, array) == "filled"
        times.append((time.perf_counter() - started) / exchanges)
        assert np.array_equal(array, x)
    return statistics.median(times) * 1e6


def main() -> None:
    """Print both figures with the machine."""
    total, kernel = per_op()
    result = {
        "op_us": round(total - kernel, 2),
        "op_with_kernel_us": round(total, 2),
        "exchange_64KiB_us": round(per_exchange(), 1),
        "exchange_4KiB_us": round(per_exchange(1, 1024), 1),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
