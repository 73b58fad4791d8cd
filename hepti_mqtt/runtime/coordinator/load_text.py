"""The load of a plan in a sentence for users: bytes, device, plan, gain and time left."""

from __future__ import annotations

from hepti_mqtt.core.plan import Plan
from hepti_mqtt.runtime.coordinator.plans import PlanRecord

GB = 1e9


def describe_load(record: PlanRecord, now: float) -> str:
    """Return a sentence on the load of a plan being prepared, "" if its devices have all weights."""
    need = 0 if record.move is None else record.move.option.load_bytes
    progress = {device: part for device, part in record.progress_bytes.items() if part[1]}
    if not progress:
        return f"Loading {need / GB:.1f} GB for {_plan(record)}" if need else ""
    device = max(progress, key=lambda name: progress[name][1] - progress[name][0])
    done, total = progress[device]
    left = ""
    if 0 < done < total:
        left = f", {(now - record.begun_s) * (total - done) / done:.0f} s left"
    return f"Loading {done / GB:.1f} of {total / GB:.1f} GB on {device} for {_plan(record)}{left}"


def describe_end(record: PlanRecord, now: float, why: str = "") -> str:
    """Return a sentence on the end of a load, "" if there was none; why: reason of an early end."""
    done = sum(part[0] for part in record.progress_bytes.values())
    if not done:
        return ""
    what = f"{done / GB:.1f} GB for {name_of(record.plan)} in {now - record.begun_s:.0f} s"
    return f"Stopped loading after {what}: {why}" if why else f"Loaded {what}"


def name_of(plan: Plan) -> str:
    """Return a short name of a plan."""
    count = len(plan.devices)
    return f"{plan.method} on {plan.root if count == 1 else f'{count} devices'}"


def _plan(record: PlanRecord) -> str:
    """Return a plan's name with the seconds of a request under it and under the active plan."""
    move = record.move
    if move is None or move.kind == "must" or move.gain >= 1:
        return name_of(record.plan)
    seconds = float(move.option.seconds.mean())
    return f"{name_of(record.plan)} ({seconds:.2g} s instead of {seconds / (1 - move.gain):.2g} s)"
