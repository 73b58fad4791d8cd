"""What methods that solve for shares know of devices beside their speed."""

from __future__ import annotations

from collections.abc import Sequence

from hepti_mqtt.planner.price import Question
from hepti_mqtt.shares import Lane


def lanes_of(question: Question, devices: Sequence[str]) -> list[Lane]:
    """Return the lanes of devices, in their order."""
    found = []
    for device in devices:
        link, known = question.cluster.links[device], question.cluster.devices[device]
        rate = min(link.up_bytes_per_s, link.down_bytes_per_s)
        lane = Lane(rate, link.latency_s, known.memory_bytes, known.speed(1), known.power, question.cluster.deadline_s)
        found.append(lane)
    return found
