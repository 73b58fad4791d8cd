"""What a search says: why a plan was chosen, and what is missing where none fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hepti_mqtt.planner.decision import Candidate
from hepti_mqtt.planner.price import Question

_WORTH_SAYING: Final = 0.05  # by how much experience differs from the simulator


def _describe(c: Candidate) -> str:
    wire = "" if c.plan.wire == "f32" else f" in {c.plan.wire}"
    return f"{c.name} on {', '.join(c.plan.devices)}{' over mesh' if c.plan.route == 'mesh' else ''}{wire}"


def _does(c: Candidate) -> str:
    """Return what a plan does by the objective that it was compared by."""
    if c.price.objective == "throughput" and c.price.load is not None:
        return f"answer {c.price.load.requests_per_s:.3g} requests/s, each in {_time(c)} alone,"
    if c.price.objective == "memory":
        return f"need {c.price.share:.0%} of a device's memory at the most, and to take {_time(c)}"
    return f"take {_time(c)}"


def _time(c: Candidate) -> str:
    off = "" if abs(c.price.learned - 1) < _WORTH_SAYING else f", by experience {c.price.expected_s * 1e3:.1f} ms,"
    return f"{c.price.seconds * 1e3:.1f} ms{off}"


def reason_of(ranking: Sequence[Candidate], chosen: Candidate, behind: Sequence[Candidate] = ()) -> str:
    """Return in one sentence why a plan was chosen; behind: what was found too slow before it was worked out."""
    tokens = chosen.plan.predicted_tokens
    parts = [f"{_describe(chosen)} is predicted to {_does(chosen)} for {tokens} tokens"]
    others = [c for c in ranking if c is not chosen]
    fitting = [c for c in others if c.price.feasible]
    if fitting:
        parts.append(f"the next best, {_describe(fitting[0])}, {_time(fitting[0])}")
    elif behind:
        parts.append(f"the next one, {_describe(behind[0])}, is far behind: {_time(behind[0])}")
    short = [c for c in others if not c.price.feasible]
    for c in short:
        where = ", ".join(f"{d} lacks {b / 2**20:.0f} MiB" for d, b in c.price.missing.items())
        parts.append(f"{c.name} does not fit ({where})")
    return "; ".join(parts)


def nothing_fits(question: Question, ranking: Sequence[Candidate]) -> str:
    """Return which device lacks how much memory for which plan."""
    lines = []
    for c in ranking:
        for device, missing in c.price.missing.items():
            have = question.cluster.devices[device].memory_bytes
            lines.append(
                f"{_describe(c)}: {device} needs {c.price.needs[device] / 2**20:.1f} MiB and has "
                f"{have / 2**20:.1f} MiB ({missing / 2**20:.1f} MiB missing)"
            )
    what = "\n  ".join(lines) or "no candidate for these devices"
    return (
        f"no strategy fits {question.naming.model} into the devices' memory:\n  {what}\n"
        "Add devices, raise --memory on the agents, or choose a smaller model."
    )
