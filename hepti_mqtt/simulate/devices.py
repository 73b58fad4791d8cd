"""Devices on the virtual clock: what each has of a Program, what runs there, and what it has been sent."""

from __future__ import annotations

from collections import deque

from hepti_mqtt.cluster import DeviceProfile
from hepti_mqtt.program import Compute, Key, Program, Send
from hepti_mqtt.schedule import ProgramRun, RunMachine, template
from hepti_mqtt.simulate.bytes import Naming, send_bytes
from hepti_mqtt.simulate.outcome import Arrival, DeviceUse


class Part:
    """A device's Program with what its ops cost there, for any number of requests.

    sizes: of each PUBLISH packet, by op. inner: of the layer that stands for several.
    """

    __slots__ = ("costs", "flops", "inner", "program", "sizes", "template")

    def __init__(
        self, naming: Naming, device: str, profile: DeviceProfile, program: Program, layer: int | None
    ) -> None:
        from hepti_mqtt.kernels import works  # here, since Numba takes longer to import than the rest of a planner

        self.program, self.template = program, template(program)
        self.costs: list[float] = []
        self.sizes: list[tuple[int, ...]] = []
        self.flops, self.inner = 0.0, DeviceUse()
        for op in program.ops:
            cost = 0.0
            sizes: tuple[int, ...] = ()
            if isinstance(op, Compute):
                work = works(op, program.slots)
                cost, flops = profile.seconds(*work), sum(part.flops for part in work)
                self.flops += flops
                if op.layer == layer:
                    self.inner.compute_s += cost
                    self.inner.flops += flops
            elif isinstance(op, Send):
                sizes = send_bytes(naming, device, op, program.slots[op.slot])
                cost = profile.frame_seconds(len(op.to), sum(sizes), op.route)
                self.inner.sent_bytes += sum(sizes) if op.layer == layer else 0
            self.costs.append(cost)
            self.sizes.append(sizes)


class DeviceRun(ProgramRun):
    """A run of a Program, and what its ops cost."""

    __slots__ = ("part",)

    def __init__(self, admission: int, part: Part) -> None:
        super().__init__(admission, part.template)
        self.part = part


class Device:
    """A device's session thread: what runs there, and what has arrived; early: exchanges that came before requests."""

    def __init__(self, name: str, profile: DeviceProfile) -> None:
        self.name, self.profile = name, profile
        self.machine: RunMachine[DeviceRun] = RunMachine()
        self.inbox: deque[Arrival] = deque()
        self.begun: set[int] = set()
        self.early: dict[int, list[Key]] = {}
        self.use = DeviceUse()
        self.busy, self.finished_s = False, 0.0
