"""What a search is asked: the devices as they are, less what other slots hold, and what the slot's pins say."""

from __future__ import annotations

from collections import Counter

from hepti_mqtt.ids import Epoch
from hepti_mqtt.models import shape_for
from hepti_mqtt.planner import Question
from hepti_mqtt.runtime.planner.membership import Membership
from hepti_mqtt.runtime.planner.model_state import ModelState
from hepti_mqtt.runtime.planner.slots import Slots
from hepti_mqtt.simulate import Naming


def question_of(
    site: str, slots: Slots, membership: Membership, model: ModelState, epoch: Epoch, in_flight: int, now: float
) -> Question:
    """Return the question for a slot's next plan, which will be of this epoch."""
    served, pins = model.served, model.plans.pins
    # Where several requests wait they run packed (packs.py), and that is when throughput counts.
    several = served.batching.requests if pins.objective == "throughput" else 1
    held = Counter(model.spare)
    for other in slots:
        # Who would make room for this plan does not count.
        gives_way = other.pinned and (other.idle or not model.pinned)
        if other.name == model.name or gives_way:
            continue
        decision = other.held()
        held.update(decision.chosen.price.needs if decision else {})
    for device, most_bytes in model.falls.most_bytes(now).items():
        if (member := membership.usable().get(device)) is not None and member.caps is not None:
            held[device] = max(held[device], member.caps.memory_budget_bytes - most_bytes)
    return Question(
        naming=Naming(site, served.name),
        spec=served.spec,
        cluster=membership.cluster(held),
        shape=shape_for(served.spec, model.tokens(), several),
        epoch=epoch,
        in_flight=in_flight,
        strategy=pins.strategy,
        options=pins.options,
        devices=pins.devices,
        wire=pins.wire,
        storage=pins.storage,
        route=pins.route,
        objective=pins.objective,
        relayed=membership.relayed(now),
        packet_bytes=membership.packet_bytes(),
        learned=model.experience.learned(now),
        accuracy=pins.accuracy,
        compare=False,
    )
