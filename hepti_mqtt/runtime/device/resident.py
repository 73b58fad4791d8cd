"""What one device keeps for one plan: read from its Prepare, and what several plans need side by side."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from hepti_mqtt.errors import WireError
from hepti_mqtt.ids import Epoch
from hepti_mqtt.kernels import Weight
from hepti_mqtt.models import spec_from_dict
from hepti_mqtt.plan import Plan
from hepti_mqtt.plan_programs import peers, programs_digest, resident_weights
from hepti_mqtt.program import WeightRef
from hepti_mqtt.runtime.device.executor import Bound
from hepti_mqtt.runtime.device.plausible import check_prepare
from hepti_mqtt.simulate import PROGRAMS, SESSIONS_BESIDE, loading_total, most_live_bytes, programs_bytes, weight_total
from hepti_mqtt.spec import RequestShape, Spec
from hepti_mqtt.wire.messages import Prepare
from hepti_mqtt.wire.peers import Peer
from hepti_mqtt.wire.topics import Topics

EpochState = Literal["asked", "loading", "subscribing", "ready", "active", "doubted", "released"]


@dataclass(slots=True)
class Resident:
    """A plan on a device, ready when it is `loaded` and its filters are `subscribed`.

    txn: of the last Prepare. live_bytes: slots and sessions of as many requests as may run at once; sessions: how many
    of these are kept. loading_bytes: beside the weights while they are loaded. programs_bytes: of the bound Programs
    that are kept. work: the topic of its requests. digest: as in `Ready`. urgent, foreseen: shapes whose Programs are
    to be built, `urgent` whatever runs meanwhile. heard: peers whose frames come directly; the broker's filters are of
    the others. loaded: weights are there, and the Programs that the planner wanted before. acknowledged: the broker's
    filters are; subscribed: and the peers that are heard are joined, all at one time at least. bound: Programs by
    request shape, the last used last. state: changed by `runtime.epochs` alone.
    """

    plan: Plan
    spec: Spec
    txn: int
    refs: tuple[WeightRef, ...]
    live_bytes: int
    sessions: int
    loading_bytes: int
    programs_bytes: int
    filters: tuple[str, ...]
    work: str
    digest: bytes
    urgent: deque[RequestShape]
    foreseen: deque[RequestShape]
    heard: tuple[Peer, ...] = ()
    weights: Mapping[WeightRef, Weight] | None = None
    loaded: bool = False
    acknowledged: bool = False
    subscribed: bool = False
    bound: OrderedDict[RequestShape, Bound] = field(default_factory=OrderedDict)
    state: EpochState = "asked"

    @property
    def key(self) -> tuple[str, Epoch]:
        """Return the model and the epoch."""
        return (self.plan.model, self.plan.epoch)

    @property
    def ready(self) -> bool:
        """Return whether requests can run under the plan."""
        return self.loaded and self.subscribed and self.state != "released"

    def keep(self, shape: RequestShape, bound: Bound) -> None:
        """Keep a Program for the next request of its shape, in place of the one used longest ago."""
        self.bound[shape] = bound
        while len(self.bound) > PROGRAMS:
            self.bound.popitem(last=False)

    def foresee(self, shape: RequestShape | None) -> None:
        """A run of this shape comes soon, so its Program is built if it is not there."""
        if shape is not None and shape not in self.bound and shape not in self.urgent:
            self.urgent.append(shape)


def plan_key(message: Prepare) -> tuple[str, Epoch]:
    """Return the model and the epoch of a Prepare; raises WireError for a plan that cannot be read."""
    try:
        plan, _ = Plan.from_dict(message.plan), spec_from_dict(message.spec)
    except (KeyError, TypeError, ValueError) as exc:
        raise _unreadable(message, exc) from exc
    return plan.model, plan.epoch


def _unreadable(message: Prepare, error: Exception) -> WireError:
    return WireError(f"prepare {message.txn}: the plan cannot be read ({error!r}); update agent or planner")


def resident_of(message: Prepare, device: str, topics: Topics) -> Resident:
    """Return what a device will keep for a Prepare; raises WireError, PlanError for one that cannot be."""
    try:
        plan, spec = Plan.from_dict(message.plan), spec_from_dict(message.spec)
        shapes = check_prepare(device, plan, spec, message.shapes, message.in_flight)
        refs = resident_weights(spec, plan, device)
        live = most_live_bytes(spec, plan, device, message.in_flight)
        programs = programs_bytes(spec, plan, device)
        sources, digest = sorted(peers(spec, plan, device)), programs_digest(spec, plan)
        told = {peer.device: peer for peer in message.peers if peer.token_out}
        heard = tuple(
            told[source] for source in sources if plan.route == "mesh" and (source, device) not in plan.relayed
        )
    except (KeyError, TypeError, ValueError) as exc:
        raise _unreadable(message, exc) from exc
    relayed = [source for source in sources if source not in {peer.device for peer in heard}]
    filters = tuple(sorted(f for source in relayed for f in topics.activations_from(plan.model, source, device)))
    sessions = max(message.in_flight, 1) + SESSIONS_BESIDE
    different = list(dict.fromkeys(shapes))
    return Resident(
        plan=plan,
        spec=spec,
        txn=message.txn,
        refs=refs,
        live_bytes=live,
        sessions=sessions,
        loading_bytes=loading_total(refs),
        programs_bytes=programs,
        filters=filters,
        work=topics.work(plan.model, plan.devices[0]),
        digest=digest,
        urgent=deque(different[: message.needed]),
        foreseen=deque(different[message.needed :]),
        heard=heard,
    )


def resident_bytes(residents: Iterable[Resident]) -> int:
    """Return what plans need side by side: epochs of one model share equal weights, and run one after the other.

    Each has Programs of its own. Loads run one after the other too, beside the plans that are loaded already.
    """
    refs: dict[str, set[WeightRef]] = {}
    live: dict[str, int] = {}
    running: dict[str, int] = {}
    loading, programs = 0, 0
    for r in residents:
        programs += r.programs_bytes
        model = r.plan.model
        refs.setdefault(model, set()).update(r.refs)
        live[model] = max(live.get(model, 0), r.live_bytes)
        if r.weights is None:
            loading = max(loading, r.loading_bytes)
        else:
            running[model] = max(running.get(model, 0), r.live_bytes)
    beside = max(sum(live.values()), sum(running.values()) + loading)
    return sum(weight_total(held) for held in refs.values()) + programs + beside
