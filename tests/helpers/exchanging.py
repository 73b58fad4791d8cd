"""Devices that exchange over real sockets in one process, each on a thread of its own: its links and its executor."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

import numpy as np

from device_agent.links import MeshLinks
from hepti_mqtt.config.process import RateLimitedLog
from hepti_mqtt.core.ids import PLANNER, PlanVersion
from hepti_mqtt.core.program import NUMPY_DTYPE
from hepti_mqtt.protocol import frames
from hepti_mqtt.protocol.frames import Frame, TensorArrival
from hepti_mqtt.protocol.keys import UNKEYED
from hepti_mqtt.protocol.messages import Endpoint, Peer
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.runtime.machinery import Publish
from hepti_mqtt.runtime.worker.executor import BoundProgram, Executor, OutgoingTensor
from hepti_mqtt.runtime.worker.interface import AllowPeers, FrameIn, JoinPeers, PeerJoined, PeerLost

TOPICS, MODEL, VERSION = Topics("home"), "m", PlanVersion(1, 1)
PATIENCE_S = 30.0
_DTYPE = {dtype.str: name for name, dtype in NUMPY_DTYPE.items()}


class Device:
    """One device of a site: what `device_agent.shell` and `runtime.worker.runs` do around an executor, and no more."""

    def __init__(self, name: str, bound: BoundProgram) -> None:
        self.name, self.bound = name, bound
        self.executor, self.joined = Executor(), set()
        self.complaints = RateLimitedLog(logging.getLogger("test"))
        self.links = MeshLinks(TOPICS, name, 1, self.complaints, "127.0.0.1")
        self.outputs: dict[int, list[tuple[int, np.ndarray]]] = {}
        self.early: list[TensorArrival | FrameIn] = []
        self.over: list[int] = []
        self.dropped: list[str] = []
        self.key = UNKEYED
        #: whether Python exchanges all frames
        self.checks_all = False
        #: called before each step
        self.before_step: Callable[[Device], None] = lambda _: None
        #: whole frames that Python has sent, and peers that were lost
        self.sent: list[bytes] = []
        self.lost: list[str] = []

    @property
    def compiled(self) -> int:
        """Return how many frames compiled code has sent and received."""
        return self.links.mesh.channels.traffic[0]

    def introduce(self, others: Mapping[str, Device]) -> None:
        peers = tuple(
            Peer(name, Endpoint("127.0.0.1", other.links.mesh.port), f"{name}-{self.name}", f"{self.name}-{name}")
            for name, other in others.items()
            if other is not self
        )
        self.links.admit(AllowPeers(MODEL, VERSION, peers))
        self.links.join(JoinPeers(MODEL, VERSION, peers))

    def admit(self, run_id: int, inputs: np.ndarray, bound: BoundProgram | None = None) -> None:
        bound = bound or self.bound
        slots = bound.template.program.slots
        states = {spec.state: np.zeros(spec.shape, NUMPY_DTYPE[spec.dtype]) for spec in slots if spec.state}
        self.executor.admit(run_id, bound, states)
        self.outputs[run_id] = []
        for key in bound.template.inputs:
            self.executor.deliver(run_id, key, inputs)
        early, self.early = self.early, []
        for event in early:
            self.take(event)

    def take(self, event: object) -> None:
        if isinstance(event, PeerJoined):
            self.joined.add(event.peer)
        elif isinstance(event, PeerLost):
            self.lost.append(event.peer)
        elif isinstance(event, TensorArrival | FrameIn):
            run_id = event.run_id if isinstance(event, TensorArrival) else event.frame.run_id
            if run_id in self.over:
                self.dropped.append("late")
            elif run_id not in self.executor:
                self.early.append(event)
            elif isinstance(event, TensorArrival):
                assert event.has_tag(self.key)
                outcome = self.executor.deliver(
                    run_id, event.exchange.key, event.array(), event.exchange.head, self.key
                )
                self.dropped += [] if outcome == "filled" else [outcome]
            else:
                frame = event.frame
                self.dropped.append(
                    self.executor.deliver(run_id, (frame.node, frame.part, frame.source), frame.array())
                )

    def publish(self, out: OutgoingTensor) -> None:
        if out.op.to == (PLANNER,):
            self.outputs[out.run_id].append((out.op.row, np.array(out.array)))
            return
        op, array = out.op, out.array
        frame = Frame(
            "tensor", MODEL, VERSION, out.run_id, op.layer, op.node, self.name, op.part, _DTYPE[array.dtype.str],
            array.shape, op.row, body=array.data.cast("B") if array.size else b"",
        )  # fmt: skip
        header, body = frames.encode_parts(frame, self.key)
        for place, to in enumerate(op.to):
            topic = TOPICS.activation(MODEL, op.layer, self.name, to)
            self.links.publish(Publish(topic, header, 0, "mesh", body=body))
            self.sent = [*self.sent[-8:], bytes(header) + bytes(body)]
            if array.size and out.rows:
                prefix = frames.header_prefix(frame, body.nbytes)
                out.rows[place].learn(frames.frame_header(prefix, bytes(8), b"", UNKEYED), self.key, topic)

    def turn(self, timeout_s: float, limit_s: float = 0.0) -> None:
        """Run a step, or wait for peers."""
        step = self.executor.next_step()
        if step is None:
            for event in self.links.wait(timeout_s):
                self.take(event)
            return
        self.before_step(self)
        out = step.run(limit_s, sockets=None if self.checks_all else self.links.mesh.channels)
        if out is not None:
            self.publish(out)
        for event in self.links.wait(0.0) if limit_s else ():
            self.take(event)

    def work(
        self, run_ids: tuple[int, ...], limit_s: float, continues: Callable[[Device], bool] = lambda _: True
    ) -> None:
        """Work until some runs are over, or are ended."""
        until = time.monotonic() + PATIENCE_S
        left = set(run_ids)
        while left:
            assert time.monotonic() < until, (self.name, left)
            if not continues(self):
                for run_id in left:
                    self.executor.drop(run_id)
            else:
                self.turn(0.02, limit_s)
            for run_id in [r for r in left if r not in self.executor or self.executor.finish_if_done(r)]:
                left.discard(run_id)
                self.over.append(run_id)


class Site:
    """Devices by name; a context manager."""

    def __init__(self, bound: Mapping[str, BoundProgram]) -> None:
        self.devices = {name: Device(name, programs) for name, programs in bound.items()}
        self.errors: list[BaseException] = []

    def __enter__(self) -> Site:
        for device in self.devices.values():
            device.introduce(self.devices)
        until = time.monotonic() + PATIENCE_S
        while any(len(d.joined) < len(self.devices) - 1 for d in self.devices.values()):
            assert time.monotonic() < until
            for device in self.devices.values():
                for event in device.links.wait(0.005):
                    device.take(event)
        return self

    def __exit__(self, *_: object) -> None:
        for device in self.devices.values():
            device.links.close()

    def run(self, inputs: Mapping[int, np.ndarray], limit_s: float = 0.0) -> dict[int, np.ndarray]:
        """Return the answers to some runs at once, by number."""
        self._together(inputs, limit_s, lambda _: True)
        return {run_id: self.answer(run_id) for run_id in inputs}

    def end_after(self, run_id: int, inputs: np.ndarray, steps: int) -> bool:
        """End a run everywhere once the first device has taken so many steps; return whether it was under way."""
        first, ended, taken = next(iter(self.devices.values())), threading.Event(), 0

        def continues(device: Device) -> bool:
            nonlocal taken
            taken += device is first
            if taken > steps:
                ended.set()
            return not ended.is_set()

        self._together({run_id: inputs}, 0.0, continues)
        return ended.is_set()

    def go_on(
        self, run_ids: tuple[int, int], heirs: Mapping[str, BoundProgram], inputs: np.ndarray, block: int, steps: int
    ) -> np.ndarray:
        """Return the answer to a run that ends before a block, and goes on in other Programs under a number of its own.

        steps: of the first device, after which it is told; the others are told at the start.
        """
        first, taken, (run_id, heir) = next(iter(self.devices.values())), 0, run_ids
        for device in self.devices.values():
            device.admit(run_id, inputs)
            device.admit(heir, inputs, heirs[device.name])
            assert device is first or device.executor.hold(run_id, block)

        def continues(device: Device) -> bool:
            nonlocal taken
            if device is first:
                taken += 1
                assert taken != steps or device.executor.hold(run_id, block)
            is_held = device is not first or taken >= steps
            if is_held and run_id in device.executor and device.executor.is_done(run_id):
                device.executor.hand_over(run_id, heir)
                device.over.append(run_id)
            return True

        self._together({heir: inputs}, 0.0, continues)
        return self.answer(heir)

    def _together(self, inputs: Mapping[int, np.ndarray], limit_s: float, continues: Callable[[Device], bool]) -> None:
        threads = [
            threading.Thread(target=self._work, args=(d, inputs, limit_s, continues)) for d in self.devices.values()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def answer(self, run_id: int) -> np.ndarray:
        parts = [part for device in self.devices.values() for part in device.outputs[run_id]]
        return np.concatenate([array for _, array in sorted(parts, key=lambda part: part[0])])

    def _work(
        self, device: Device, inputs: Mapping[int, np.ndarray], limit_s: float, continues: Callable[[Device], bool]
    ) -> None:
        try:
            for run_id, array in inputs.items():
                if run_id not in device.executor:
                    device.admit(run_id, array)
            device.work(tuple(inputs), limit_s, continues)
        except BaseException as error:
            self.errors.append(error)
