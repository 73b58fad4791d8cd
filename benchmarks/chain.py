"""The motivation of the Hepti paper: five chained MatMuls [m, 1024] x [1024, 1024] on one device or two.

The chain is a small family, and what it measures is method `row` of it: the rows of the left matrix are split, the
secondary gets the last ones in one scatter and gives its product back in one gather. In several chunks, one is computed
while others travel: the executor runs whatever is ready.

`python -m benchmarks.chain --broker URL --device NAME --run ID` is one device, and speaks lines of JSON. It says
{"ready": true} once it can hear its peer. For each line {"rows", "share", "chunks", "kind"} it says {"admitted": true},
runs on an empty line, and says what it measured: latency_s from the first op to the last, compute_s (in kernels),
sent_bytes (of packets), and error, the largest difference to NumPy (null on a device that gives nothing).
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.core.errors import HeptiError, NetworkError
from hepti_mqtt.core.ids import PLANNER, PlanVersion
from hepti_mqtt.core.program import Program
from hepti_mqtt.kernels import Workers, warm_up
from hepti_mqtt.lowering import roles
from hepti_mqtt.lowering.graph import Graph, GraphBuilder
from hepti_mqtt.lowering.layouts import PLANNER_INDEX, Table, explicit, on_device
from hepti_mqtt.lowering.lower import Lowered
from hepti_mqtt.lowering.regions import IndexSet, span
from hepti_mqtt.protocol.frames import Frame, decode, encode
from hepti_mqtt.protocol.topics import Topics, publish_bytes
from hepti_mqtt.runtime.worker.executor import BoundProgram, Executor, OutgoingTensor, bind, pack
from hepti_mqtt.transport.base import Refused, State, Subscribed
from hepti_mqtt.transport.broker_connection import BrokerConnection
from hepti_mqtt.transport.url import BrokerUrl

MODEL: Final = "chain"
EPOCH: Final = PlanVersion(1, 1)
PATIENCE_S: Final = 60.0
WIDTH: Final = 1024
MATMULS: Final = 5
PRIMARY: Final = "primary"
SECONDARY: Final = "secondary"
_PEER: Final = {PRIMARY: SECONDARY, SECONDARY: PRIMARY}

# work: rows are computed where they are. echo: they travel and nothing is computed. parts: they are computed and
# nothing travels, so that nothing disturbs either device.
Kind = Literal["work", "echo", "parts"]
KINDS: Final[tuple[Kind, ...]] = ("work", "echo", "parts")

_NAMES: Final = tuple(f"chain.{i}" for i in range(MATMULS))


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement: m rows, of which `share` percent on the secondary device, in `chunks` pieces."""

    rows: int
    share: int = 0
    chunks: int = 1
    kind: Kind = "work"

    @property
    def away(self) -> int:
        """Return the rows of the secondary device."""
        return (2 * self.rows * self.share + 100) // 200

    def pieces(self) -> tuple[tuple[int, int], ...]:
        """Return the ranges of rows that travel, one a chunk; none without rows for the secondary."""
        count = min(self.chunks, self.away)
        edges = [self.rows - self.away + self.away * i // count for i in range(count + 1)] if count else []
        return tuple(pairwise(edges))


@cache
def programs(case: Case) -> dict[str, Program]:
    """Return the Programs of the devices that have work, by name.

    The primary takes x f32 [m, 1024] from its planner and gives it the product of the same shape; in kind `parts` each
    device takes and gives only its own rows.
    """
    home = case.rows - case.away
    if case.kind == "parts":
        rows = {PRIMARY: home, SECONDARY: case.away}
        return {
            name: Lowered(_graph(n, True), _table([(0, span(0, n))]), (name,)).full_program(name)
            for name, n in rows.items()
            if n
        }
    pieces = [(0, span(0, home)), *((1, span(*rows)) for rows in case.pieces())]
    made = Lowered(_graph(case.rows, case.kind != "echo"), _table(pieces), (PRIMARY, SECONDARY))
    return {name: made.full_program(name) for name in (PRIMARY, SECONDARY) if name == PRIMARY or case.away}


def _graph(rows: int, computes: bool) -> Graph:
    """Return the chain as a graph: x [m, 1024] -> its product with every matrix; without them rows only travel."""
    net = GraphBuilder()
    x = net.rows("given", net.input("x", (rows, WIDTH), "f32"), roles.STEM)
    if not computes:
        x = net.rows("echoed", x, roles.DENSE)
    for name in _NAMES if computes else ():
        x = net.linear(name, x, roles.DENSE, {name: WIDTH}, bias=False)
    net.rows("product", x, roles.TASK)
    return net.build()


def _table(pieces: Sequence[tuple[int, IndexSet]]) -> Table:
    """Return method `row` of this chain: a device has the same rows of every product; the first has the input's."""
    return Table(
        {
            roles.INPUT: on_device(PLANNER_INDEX),
            roles.STEM: explicit((0, {0: rows}) for _, rows in pieces),
            roles.DENSE: explicit((device, {0: rows}) for device, rows in pieces),
            roles.TASK: on_device(0),
        }
    )


def weights(seed: int) -> dict[str, NDArray[np.float32]]:
    """Return the right matrices, scaled so that a product is of the size of its left matrix."""
    rng = np.random.default_rng([seed, 1])
    return {
        f"{name}.weight": rng.standard_normal((WIDTH, WIDTH), np.float32) / np.float32(WIDTH**0.5) for name in _NAMES
    }


def left(seed: int, rows: int) -> NDArray[np.float32]:
    """Return the left matrix [rows, 1024]."""
    return np.random.default_rng([seed, 2, rows]).standard_normal((rows, WIDTH), np.float32)


def reference(case: Case, x: NDArray[Any], matrices: dict[str, NDArray[np.float32]]) -> NDArray[Any]:
    """Return what the case must give, by NumPy in the input's precision."""
    for name in _NAMES if case.kind != "echo" else ():
        x = x @ matrices[f"{name}.weight"]
    return x


@dataclass(slots=True)
class _Run:
    """What one admitted case needs and gives."""

    admission: int
    bound: BoundProgram | None
    given: NDArray[Any] | None
    expected: NDArray[Any] | None
    output: NDArray[Any] | None = None
    sent_bytes: int = 0


class ChainDevice:
    """One device: its connection, its weights and its executor; frames of cases that are over are dropped."""

    def __init__(self, broker: BrokerUrl, device: str, run: str, seed: int) -> None:
        self.device, self.seed = device, seed
        self._topics = Topics(run)
        self._heard: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._subscribed = threading.Event()
        self._refused = ""
        self._matrices = weights(seed)
        self._resident = pack(self._matrices, programs(Case(1))[PRIMARY].weights())
        self._workers = Workers(1)
        self._executor = Executor()
        self._admission = 0
        self._inputs: dict[int, NDArray[Any]] = {}
        self._references: dict[Case, NDArray[Any]] = {}
        self._transport = BrokerConnection(
            broker,
            f"{run}-{device}",
            on_message=lambda _, payload: self._heard.put(payload),
            on_state=self._on_state,
            protocol=4,
        )

    def connect(self) -> None:
        """Connect and hear the peer; raises NetworkError, RefusedError."""
        self._transport.connect()
        filters = self._topics.activations_from(MODEL, _PEER[self.device], self.device)
        self._transport.subscribe([(f, 0) for f in filters])
        if not self._subscribed.wait(PATIENCE_S) or self._refused:
            raise NetworkError(
                f"the broker did not take the subscription of {self.device}: {self._refused or 'silence'}"
            )

    def close(self) -> None:
        """Leave the broker and end the worker."""
        self._transport.close()
        self._workers.close()

    def admit(self, case: Case) -> Callable[[], dict[str, Any]]:
        """Prepare a case on this device; return what runs and measures it."""
        self._admission += 1
        program = programs(case).get(self.device)
        bound = None if program is None else bind(program, self._resident, self._workers)
        given = expected = None
        if program is not None and PLANNER in program.sources():
            rows = slice(case.rows - case.away, None) if self.device == SECONDARY else slice(None)
            if case.kind == "parts" and self.device == PRIMARY:
                rows = slice(case.rows - case.away)
            given = self._input(case.rows)[rows]
            expected = self._reference(case)[rows]
        run = _Run(self._admission, bound, given, expected)
        if bound is not None:
            self._executor.admit(run.admission, bound)
        return lambda: self._run(run)

    def _run(self, run: _Run) -> dict[str, Any]:
        begin = time.perf_counter()
        compute_s = 0.0
        if run.bound is not None:
            if run.given is not None:
                for key in run.bound.template.inputs:
                    self._executor.deliver(run.admission, key, run.given)
            compute_s = self._work(run)
        latency_s = time.perf_counter() - begin
        error = None
        if run.output is not None and run.expected is not None:
            error = float(np.abs(run.output - run.expected).max(initial=0.0))
        return {"latency_s": latency_s, "compute_s": compute_s, "sent_bytes": run.sent_bytes, "error": error}

    def _work(self, run: _Run) -> float:
        """Run the admitted Program to its end; return the seconds in kernels."""
        compute_s = 0.0
        until = time.monotonic() + PATIENCE_S
        while not self._executor.finish_if_done(run.admission):
            while not self._heard.empty():
                self._deliver(run, self._heard.get())
            step = self._executor.next_step()
            if step is None:
                self._deliver(run, self._next(until))
                continue
            begin = time.perf_counter()
            outgoing = step.run()
            if step.kernel is not None:
                compute_s += time.perf_counter() - begin
            if outgoing is not None:
                self._send(run, outgoing)
        return compute_s

    def _next(self, until: float) -> bytes:
        try:
            return self._heard.get(timeout=max(until - time.monotonic(), 0.0))
        except queue.Empty:
            raise NetworkError(
                f"{self.device} heard nothing of {_PEER[self.device]} for {PATIENCE_S:g} s; look at its log"
            ) from None

    def _deliver(self, run: _Run, payload: bytes) -> None:
        frame = decode(payload)
        if frame.run_id == run.admission:
            self._executor.deliver(run.admission, (frame.node, frame.part, frame.source), frame.array())

    def _send(self, run: _Run, outgoing: OutgoingTensor) -> None:
        op, array = outgoing.op, outgoing.array
        if op.to == (PLANNER,):
            run.output = np.array(array)
            return
        frame = Frame(
            "tensor", MODEL, EPOCH, run.admission, op.layer, op.node, self.device, op.part,
            dtype="f32", shape=array.shape, body=array,
        )  # fmt: skip
        topic = self._topics.activation(MODEL, op.layer, self.device, op.to[0])
        payload = encode(frame)
        # Not the transport's counter: that one moves when the network thread has sent, which may be after the report.
        run.sent_bytes += publish_bytes(topic, len(payload), 0)
        self._transport.publish(topic, payload)

    def _on_state(self, state: State) -> None:
        if isinstance(state, Refused):
            self._refused = state.reason
        if isinstance(state, Subscribed | Refused):
            self._subscribed.set()

    def _input(self, rows: int) -> NDArray[Any]:
        if rows not in self._inputs:
            self._inputs[rows] = left(self.seed, rows)
        return self._inputs[rows]

    def _reference(self, case: Case) -> NDArray[Any]:
        key = Case(case.rows, kind="echo" if case.kind == "echo" else "work")
        if key not in self._references:
            self._references[key] = reference(key, self._input(case.rows), self._matrices)
        return self._references[key]


def main(arguments: list[str]) -> int:
    """Serve cases until the input ends; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chain")
    parser.add_argument("--broker", required=True)
    parser.add_argument("--device", required=True, choices=tuple(_PEER))
    parser.add_argument("--run", required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    device = None
    try:
        warm_up()
        device = ChainDevice(BrokerUrl.parse(options.broker), options.device, options.run, options.seed)
        device.connect()
        _say({"ready": True})
        for line in sys.stdin:
            run = device.admit(Case(**json.loads(line)))
            _say({"admitted": True})
            if not sys.stdin.readline():
                break
            _say(run())
    except HeptiError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        if device is not None:
            device.close()
    return 0


def _say(words: dict[str, Any]) -> None:
    print(json.dumps(words), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
