"""What small ops and exchanges cost: per op (bar 1 µs), per exchange (bar 100 µs, without transport)."""

from __future__ import annotations

import time
from collections import Counter
from statistics import median
from typing import Final

import numpy as np

from benchmarks.tables import table
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.program import Compute, Op, Program, Recv, Send, SlotSpec
from hepti_mqtt.kernels import Workers
from hepti_mqtt.protocol import frames
from hepti_mqtt.protocol.frames import ExchangeCache
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.runtime.machinery import Publish
from hepti_mqtt.runtime.worker import runs
from hepti_mqtt.runtime.worker.executor import Executor, bind
from hepti_mqtt.runtime.worker.runs import WorkerRun

OPS, EXCHANGES, RUNS = 400, 50, 60
INPUT, OUTPUT, VALUE = 0, 1, 2  # nodes; a value of each exchange has one of its own, from VALUE on
PLANNER: Final = "planner"


def main() -> None:
    """Print medians of many runs; results are checked first."""
    rows = [("op, with its kernel", _per_op())]
    rows += [(f"exchange of {4 * rows} KiB", _per_exchange(rows, 1024)) for rows in (16, 1)]
    print("\n".join(table(("of", "µs"), rows)))


def _per_op() -> float:
    """Return µs per op of a Program of tiny ops: each adds the input."""
    ops = [Compute("add", (n, 0), (n + 1,), (), {"bias": False}) for n in range(OPS)]
    chain: tuple[Op, ...] = (Recv(0, PLANNER, INPUT), *ops, Send(OPS, (PLANNER,), OUTPUT))
    bound = bind(Program("a", (SlotSpec((1, 8)),) * (OPS + 1), chain), {}, Workers(1))
    x = np.arange(8, dtype=np.float32).reshape(1, 8)
    executor = Executor()
    totals = []
    for run in range(RUNS):
        executor.admit(run, bound)
        executor.deliver(run, (INPUT, 0, PLANNER), x)
        outgoing = None
        started = time.perf_counter()
        while (step := executor.next_step()) is not None:
            outgoing = step.run() or outgoing
        totals.append((time.perf_counter() - started) / OPS)
        assert outgoing is not None
        assert np.array_equal(outgoing.array, (OPS + 1) * x)
        executor.finish_if_done(run)
    return median(totals) * 1e6


def _per_exchange(rows: int, columns: int) -> float:
    """Return µs from a filled slot on one device to a filled slot on another: frame, bytes, checks, delivery."""
    slot, layers = SlotSpec((rows, columns)), range(EXCHANGES)
    sends = [Send(0, ("b",), VALUE + layer, 0, layer) for layer in layers]
    sender = Program("a", (slot,), (Recv(0, PLANNER, INPUT), *sends))
    receiver = Program("b", (slot,) * EXCHANGES, tuple(Recv(n, "a", VALUE + n, 0, n) for n in layers))
    session = runs.WorkerRuns("a", Topics("home"), Counter())
    plan = Plan("m", PlanVersion(1, 1), "row", ("a", "b"), "a")
    x = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    times, known = [], ExchangeCache()
    out, into = bind(sender, {}, Workers(1)), bind(receiver, {}, Workers(1))
    for run in range(RUNS):
        here, there = Executor(), Executor()
        here.admit(run, out)
        there.admit(run, into)
        here.deliver(run, (INPUT, 0, PLANNER), x)
        work = frames.Frame("work", "m", PlanVersion(1, 1), run)
        sending = WorkerRun(plan, work, 0.0, (), x, out.sends)
        started = time.perf_counter()
        while (step := here.next_step()) is not None:
            outgoing = step.run()
            for publish in session.publish_sent(sending, outgoing) if outgoing is not None else ():
                assert isinstance(publish, Publish)
                payload = memoryview(publish.joined_payload)
                arrival = known.arrival("a", publish.topic, payload)
                if arrival is None:  # in the first run
                    known.learn("a", publish.topic, payload, frames.decode(payload))
                    arrival = known.arrival("a", publish.topic, payload)
                assert arrival is not None
                array = arrival.array()
                assert there.deliver(run, arrival.exchange.key, array) == "filled"
        times.append((time.perf_counter() - started) / EXCHANGES)
        assert np.array_equal(array, x)
    return median(times) * 1e6
