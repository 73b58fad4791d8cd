"""Bytes on the wire of a request, exactly as the agents and the planner count them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from hepti_mqtt.ids import PLANNER
from hepti_mqtt.models import input_bytes
from hepti_mqtt.program import Program, Send, SlotSpec, addresses
from hepti_mqtt.spec import RequestShape, Spec
from hepti_mqtt.wire.frames import frame_bytes, work_bytes
from hepti_mqtt.wire.topics import Topics, publish_bytes


class Naming(NamedTuple):
    """The names that stand in topics, on which the bytes depend."""

    site: str
    model: str


def send_bytes(naming: Naming, device: str, op: Send, slot: SlotSpec) -> tuple[int, ...]:
    """Return the size of each PUBLISH packet of a Send."""
    topics = Topics(naming.site)
    out = []
    for to in addresses(op):
        if to == PLANNER:
            out.append(publish_bytes(topics.up(device), frame_bytes(slot.nbytes), 1))
        else:
            topic = topics.activation(naming.model, op.layer, device, to)
            out.append(publish_bytes(topic, frame_bytes(slot.nbytes), 0))
    return tuple(out)


def dispatch_bytes(naming: Naming, spec: Spec, shape: RequestShape, devices: Iterable[str]) -> int:
    """Return the size of the planner's PUBLISH that hands a request to the devices of a plan, in their order."""
    topic = Topics(naming.site).work(naming.model, next(iter(devices)))
    return publish_bytes(topic, work_bytes(shape, input_bytes(spec, shape)), 1)


def done_bytes(naming: Naming, device: str) -> int:
    """Return the size of the PUBLISH by which a device reports that it has finished a request."""
    return publish_bytes(Topics(naming.site).up(device), frame_bytes(0), 1)


def largest_packet_bytes(naming: Naming, spec: Spec, shape: RequestShape, programs: dict[str, Program]) -> int:
    """Return the size of the largest single PUBLISH of a request that the broker carries."""
    sizes = [dispatch_bytes(naming, spec, shape, programs)]
    for device, program in programs.items():
        sends = (op for op in program.ops if isinstance(op, Send) and op.route == "broker")
        sizes += [size for op in sends for size in send_bytes(naming, device, op, program.slots[op.slot])]
    return max(sizes)


def sent_bytes(naming: Naming, spec: Spec, shape: RequestShape, programs: dict[str, Program]) -> int:
    """Return all bytes that planner and devices send for one request, copies made by a broker excluded."""
    total = dispatch_bytes(naming, spec, shape, programs)
    for device, program in programs.items():
        total += done_bytes(naming, device)
        for op in program.ops:
            if isinstance(op, Send):
                total += sum(send_bytes(naming, device, op, program.slots[op.slot]))
    return total
