"""A device as its planner knows it: what it says of itself, what it holds, and how it loads what a plan needs."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final, NamedTuple

from hepti_mqtt import __version__
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.profiles import DeviceProfile
from hepti_mqtt.core.program import WeightRef
from hepti_mqtt.core.spec import Spec
from hepti_mqtt.cost.memory import matrices, weights_bytes
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.messages import Caps, Endpoint, PeerStats
from hepti_mqtt.strategies.plan_programs import programs_digest, resident_weights

IDLE_S: Final = 5.0  # a meter without ops for so long says that the device is as measured ...
SMALL_DEVIATION: Final = 1.5  # ... unless it was slower or faster by less
PREPARE_S: Final = 0.6  # Programs, subscriptions and words of a plan whose weights are there


class LoadCost(NamedTuple):
    """How loads and runs share processors, links and the hub, as measured on emulated hosts."""

    bytes_per_s: float = 67e6  #: that an idle processor loads
    cpu_share: float = 0.05  #: of the processor for a load without a share of its own (`device_agent.budget`)
    link_share: float = 0.1  #: of the link for such a load (`service.tiles`)
    in_use_s: float = 5.0  #: after a run: the processor is still shared
    burst_s: float = 2.0  #: after a Prepare: Programs are built
    burst: float = 1.8  #: slowdown of runs meanwhile
    hub_s: float = 0.4  #: mean delay of a request while the hub sends tiles


LOAD: Final = LoadCost()


@dataclass(slots=True)
class _Load:
    """A plan on its way: what is missing of its weights, and when everything else is ready."""

    prepare: messages.Prepare
    plan: Plan
    spec: Spec
    refs: tuple[WeightRef, ...]
    missing_bytes: float = -1.0
    total_bytes: int = 0
    ready_s: float = 0.0
    begun_s: float = 0.0
    net_bytes: float = 0.0  #: missing bytes that are not in the cache


@dataclass(slots=True)
class SimulatedDevice:
    """One device. Loads run one after the other; weights stay until their memory is needed.

    plans: that are ready here. held: weight ranges with their bytes, last used last. loaded_bytes: in all. resident:
    all weights are here, whatever a plan needs. timed: bytes and microseconds of exchanges, by peer. ran_s: when
    it last began with a run. metered: what its meter said last.
    """

    name: str
    profile: DeviceProfile
    boot: int = 1
    seq: int = 0
    up: bool = True
    plans: dict[PlanVersion, Plan] = field(default_factory=dict)
    held: OrderedDict[WeightRef, int] = field(default_factory=OrderedDict)
    loads: deque[_Load] = field(default_factory=deque)
    loaded_bytes: float = 0.0
    resident: bool = False
    disk: dict[WeightRef, int] | None = None  #: cached weights with their bytes; None: the cache has all
    cpu_taken: float = 0.0  #: share of the processor that the load takes
    net_taken: float = 0.0  #: bytes of the last step that came over the link
    link_taken: float = 0.0  #: share of the link that the load takes
    timed: dict[str, tuple[int, int]] = field(default_factory=dict)
    ran_s: float = -inf
    metered: float = 1.0

    def meter(self, slowdown: float, now: float) -> float:
        """Return what its meter says, as `device_agent.heartbeat` has it: it only sees ops of runs."""
        if now - self.ran_s <= IDLE_S:
            self.metered = slowdown
        elif not 1 / SMALL_DEVIATION < self.metered < SMALL_DEVIATION:
            self.metered = 1.0
        return self.metered

    @property
    def is_loading(self) -> bool:
        """Return whether weights are on their way."""
        return bool(self.loads) and self.loads[0].missing_bytes > 0

    def caps(self, endpoint: Endpoint | None) -> Caps:
        """Return what it has measured of itself."""
        p = self.profile
        curves: dict[str, Any] = {
            "linear": [
                {
                    "k": c.k,
                    "n": c.n,
                    "points": [*map(list, c.points)],
                    "storage": c.product.weights,
                    "x": "i8" if c.product.rounded else "f32",
                }
                for c in p.linear
            ],
            "attention_flops_per_s": p.attention_flops_per_s,
            "rowwise_bytes_per_s": p.rowwise_bytes_per_s,
            "op_overhead_s": p.op_overhead_s,
            "frame_s": p.frame_s,
            "copy_bytes_per_s": p.copy_bytes_per_s,
            "mesh_frame_s": p.mesh_frame_s,
            "mesh_copy_bytes_per_s": p.mesh_copy_bytes_per_s,
        }
        memory = int(min(p.memory_bytes, 1 << 50))
        return Caps(self.name, self.boot, 4, 4, memory, 0, "plain", __version__, curves, 0, 4, endpoint)

    def restart(self) -> None:
        """Lose everything but what is on the disk, and start under a new boot counter."""
        self.boot += 1
        self.plans.clear()
        self.held.clear()
        self.loads.clear()
        self.timed.clear()

    @property
    def edges(self) -> dict[str, PeerStats]:
        """Return what has come from peers since the boot."""
        return {peer: PeerStats(0, nbytes, 0, 0, 0, 0, 0, 1, nbytes, us) for peer, (nbytes, us) in self.timed.items()}

    def receive(self, source: str, nbytes: float, bytes_per_s: float) -> None:
        """Take what has come from a peer in a run, and note how long it took where nothing else was to do."""
        known, us = self.timed.get(source, (0, 0))
        self.timed[source] = known + int(nbytes), us + int(1e6 * nbytes / bytes_per_s)

    def take(self, message: messages.Message, spec: Spec) -> list[messages.Message]:
        """Take a planner's message; return the answers that need no time."""
        if isinstance(message, messages.Release):
            self.plans.pop(message.plan_version, None)
            for load in [load for load in self.loads if load.plan.version == message.plan_version]:
                self.loads.remove(load)
                self._cache(load)
        elif isinstance(message, messages.ReleaseAll):
            self.plans.clear()
            for load in self.loads:
                self._cache(load)
            self.loads.clear()
        elif isinstance(message, messages.Prepare):
            plan = Plan.from_dict(message.plan)
            if plan.version in self.plans:
                return [self._ready(message.transaction_id, plan, spec)]
            known = next((load for load in self.loads if load.plan.version == plan.version), None)
            if known is None:
                self.loads.append(_Load(message, plan, spec, resident_weights(spec, plan, self.name)))
            else:
                known.prepare = message
        return []

    def slower(self, now: float, compute: float) -> float:
        """Return the slowdown of a run by the device's load; compute: the run's part that does not wait for links."""
        if not self.loads:
            return 1.0
        burst = LOAD.burst if now - self.loads[0].begun_s < LOAD.burst_s else 1.0
        return compute * max(1 / (1 - self.cpu_taken), burst) + (1 - compute) / (1 - self.link_taken)

    def advance(
        self, now: float, seconds: float, slowdown: float, link: float, bytes_per_s: float
    ) -> list[messages.Message]:
        """Go on loading for some seconds, at a link's rate and a processor's; return what there is to say."""
        self.cpu_taken = self.net_taken = self.link_taken = 0.0
        if not self.loads:
            return []
        load = self.loads[0]
        if load.missing_bytes < 0:
            load.missing_bytes = load.total_bytes = 0 if self.resident else weights_bytes(load.refs, self.held)
            self.loaded_bytes += load.total_bytes
            if self.disk is not None and load.missing_bytes:
                load.net_bytes = min(weights_bytes(load.refs, [*self.disk, *self.held]), load.missing_bytes)
            load.ready_s, load.begun_s = now + PREPARE_S * slowdown, now
        was, whole = load.missing_bytes, seconds * LOAD.bytes_per_s / max(slowdown, 0.3)
        net = min(load.net_bytes, seconds * link)
        step = min(seconds * bytes_per_s / max(slowdown, 0.3), was - load.net_bytes + net)
        load.missing_bytes, load.net_bytes = max(was - step, 0.0), max(load.net_bytes - min(net, step), 0.0)
        self.cpu_taken, self.net_taken = min(step / whole, 0.9), min(net, step)
        if was > 0:
            load.ready_s = now + PREPARE_S * slowdown
            return [self._progress(load)]
        if now < load.ready_s:
            return []
        self.loads.popleft()
        self.plans[load.plan.version] = load.plan
        self._hold(load.refs)
        return [self._ready(load.prepare.transaction_id, load.plan, load.spec)]

    def _cache(self, load: _Load) -> None:
        """Keep the weights of an abandoned load that have arrived."""
        if self.disk is None or load.missing_bytes < 0:
            return
        left = load.total_bytes - load.missing_bytes
        for matrix in dict.fromkeys(matrices(load.refs, self.held).values()):
            nbytes = 0 if matrix in self.held else weights_bytes([matrix])
            if nbytes > left:
                return
            left -= nbytes
            self.disk[matrix] = nbytes

    def _hold(self, refs: tuple[WeightRef, ...]) -> None:
        needed = dict.fromkeys(matrices(refs, self.held).values())
        for matrix in needed:
            self.held[matrix] = self.held.get(matrix) or weights_bytes([matrix])
            if self.disk is not None:
                self.disk[matrix] = self.held[matrix]
            self.held.move_to_end(matrix)
        total = sum(self.held.values())
        while total > max(self.profile.memory_bytes, sum(self.held[matrix] for matrix in needed)):
            total -= self.held.popitem(last=False)[1]

    def _progress(self, load: _Load) -> messages.PrepareProgress:
        done = int(load.total_bytes - load.missing_bytes)
        plan = load.plan
        return messages.PrepareProgress(load.prepare.transaction_id, plan.model, plan.version, done, load.total_bytes)

    def _ready(self, transaction_id: int, plan: Plan, spec: Spec) -> messages.Ready:
        nbytes = sum(self.held.values())
        return messages.Ready(transaction_id, plan.model, plan.version, nbytes, programs_digest(spec, plan))
