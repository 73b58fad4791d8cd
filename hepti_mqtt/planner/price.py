"""The price of one candidate plan: predicted time and bytes by simulation, memory by the Programs' own accounting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Final

from hepti_mqtt.cluster import Cluster
from hepti_mqtt.ids import ALL, Epoch
from hepti_mqtt.models import tensor_sources
from hepti_mqtt.plan import Plan, Storage, WireDtype
from hepti_mqtt.planner.experience import Learned
from hepti_mqtt.program import ITEMSIZE
from hepti_mqtt.simulate import (
    DeviceUse,
    Naming,
    largest_packet_bytes,
    live_bytes,
    loading_total,
    simulate,
    weight_total,
)
from hepti_mqtt.spec import ModelSpec, RequestShape
from hepti_mqtt.strategies import largest_shape, program, programs, resident_weights
from hepti_mqtt.wire.frames import frame_bytes
from hepti_mqtt.wire.manifest import TILE, VECTOR_TILE
from hepti_mqtt.wire.topics import Topics, publish_bytes

_FEW: Final = 2  # layers of the short model; one more gives the cost of an inner layer


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be planned.

    shape: the request to optimise for. in_flight: requests that run at once. strategy, devices, wire, storage: what the
    user pinned. packet_bytes: of the largest packet that gets through, None if any does. learned: from earlier runs.
    """

    naming: Naming
    spec: ModelSpec
    cluster: Cluster
    shape: RequestShape
    epoch: Epoch
    in_flight: int = 1
    strategy: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] | None = None
    wire: WireDtype = "f32"
    storage: Storage = "f32"
    packet_bytes: int | None = None
    learned: Learned = field(default_factory=Learned)


@dataclass(frozen=True, slots=True)
class Price:
    """What a plan costs: seconds and bytes of one request, bytes needed and missing per device, use of each device.

    learned: how many times as long it took in earlier runs than the simulator says.
    """

    seconds: float
    nbytes: int
    needs: Mapping[str, int]
    missing: Mapping[str, int]
    use: Mapping[str, DeviceUse]
    learned: float = 1.0

    @property
    def expected_s(self) -> float:
        """Return the seconds of one request by simulation and experience: what plans are compared by."""
        return self.seconds * self.learned

    @property
    def feasible(self) -> bool:
        """Return whether every device has room for its part."""
        return not self.missing


def needed_bytes(question: Question, plan: Plan, device: str) -> int:
    """Return the resident bytes of a device under a plan: weights, and live slots of every request in flight.

    While the weights are loaded nothing runs yet, but blocks that are not complete may take more than the slots.

    Inner layers are alike, so the sum over all layers follows exactly from a model of three layers and its inner one.
    """
    spec = question.spec
    short = replace(spec, layers=min(_FEW + 1, spec.layers))
    refs = resident_weights(short, plan, device)
    inner = [ref for ref in refs if ref.tensor.startswith(f"layers.{_FEW - 1}.")]
    weights = weight_total(refs) + weight_total(inner) * (spec.layers - short.layers)
    loading = loading_total([*refs, *inner * (spec.layers - short.layers)])
    shape = largest_shape(spec)
    live = max(live_bytes(program(short, plan, s, device)) for s in (shape, replace(shape, want="hidden")))
    return weights + max(live * max(question.in_flight, 1), loading)


def memory(question: Question, plan: Plan) -> tuple[dict[str, int], dict[str, int]]:
    """Return (bytes needed, bytes missing where they do not fit) by device."""
    needs = {d: needed_bytes(question, plan, d) for d in plan.devices}
    room = {d: question.cluster.devices[d].memory_bytes for d in plan.devices}
    return needs, {d: int(n - room[d]) for d, n in needs.items() if n > room[d]}


def plan_packet(question: Question, plan: Plan) -> int:
    """Return the bytes of the largest packet that a request of one sequence may need under a plan.

    The output of a batch, or of want="hidden", may be larger: the head device refuses such a request by itself.
    """
    short = replace(question.spec, layers=min(_FEW + 1, question.spec.layers))  # inner layers are alike
    shape = largest_shape(short)
    return largest_packet_bytes(question.naming, short, shape, programs(short, plan, shape))


def tile_packet(question: Question) -> int:
    """Return the bytes of the largest packet that brings weights to a device."""
    most = max(_tile_items(source.shape) for source in tensor_sources(question.spec))
    topics = Topics(question.naming.site)
    names = (ALL, *question.cluster.devices)
    return max(publish_bytes(topics.weights(n), frame_bytes(most * ITEMSIZE["f32"]), 1) for n in names)


def _tile_items(shape: tuple[int, ...]) -> int:
    return min(shape[0], VECTOR_TILE) if len(shape) == 1 else prod(min(side, TILE) for side in shape)


def price(question: Question, plan: Plan, full: bool = False) -> Price:
    """Return the price of `plan`.

    Not full: the time is extrapolated from a model of two and of three layers, which costs a tenth; the search uses
    that. Full: all layers are simulated.
    """
    spec, shape = question.spec, question.shape
    needs, missing = memory(question, plan)
    learned = question.learned.factor(plan)
    if full or spec.layers <= _FEW + 1:
        parts = programs(spec, plan, shape)
        result = simulate(question.naming, spec, shape, parts, question.cluster)
        return Price(result.seconds, result.nbytes, needs, missing, result.devices, learned)
    few, more = (replace(spec, layers=n) for n in (_FEW, _FEW + 1))
    low = simulate(question.naming, few, shape, programs(few, plan, shape), question.cluster)
    high = simulate(question.naming, more, shape, programs(more, plan, shape), question.cluster)
    left = spec.layers - more.layers
    use = {
        d: DeviceUse(
            compute_s=h.compute_s + left * (h.compute_s - low.devices[d].compute_s),
            wait_s=h.wait_s + left * (h.wait_s - low.devices[d].wait_s),
            flops=h.flops + left * (h.flops - low.devices[d].flops),
            sent_bytes=h.sent_bytes + left * (h.sent_bytes - low.devices[d].sent_bytes),
        )
        for d, h in high.devices.items()
    }
    seconds = high.seconds + left * (high.seconds - low.seconds)
    return Price(seconds, high.nbytes + left * (high.nbytes - low.nbytes), needs, missing, use, learned)
