"""What happened to one cell while a script changed the lab: requests, changes, and what lies between two of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hepti_mqtt.bench.experiment import Cell


@dataclass
class Play:
    """What happened to one cell under changes. unix_s: when it began; whole: it was not cut off.

    requests: `under_change` records; changes: `change` records, which have `do`, `host` and how much.
    """

    cell: Cell
    unix_s: float
    requests: list[Mapping[str, Any]] = field(default_factory=list)
    changes: list[Mapping[str, Any]] = field(default_factory=list)
    whole: bool = False


@dataclass
class Part:
    """The requests between two events. at_s: of the event, after the play's begin; what: a change, or "" for a plan."""

    at_s: float
    what: str
    plan: str
    requests: list[Mapping[str, Any]] = field(default_factory=list)


def parts(play: Play) -> list[Part]:
    """Return the play cut at every change and at every answer under another plan than the one before it.

    A request belongs to where it began. One that failed has no plan and cuts nothing.
    """
    found = [Part(0.0, "begin", "")]
    events = [(r["unix_s"], r) for r in (*play.changes, *play.requests)]
    for unix_s, record in sorted(events, key=lambda event: event[0]):
        at_s = unix_s - play.unix_s
        if record["record"] == "change":
            found.append(Part(at_s, change_words(record), found[-1].plan))
            continue
        plan = plan_words(record["plan"]) if record["ok"] else found[-1].plan
        if found[-1].plan and plan != found[-1].plan:
            found.append(Part(at_s, "", plan))
        found[-1].plan = plan
        found[-1].requests.append(record)
    return found


def change_words(change: Mapping[str, Any]) -> str:
    """Return what was done, e.g. "rate pi2 50 Mbit/s", and why it failed if it did."""
    units = {"mbit": "{:g} Mbit/s", "gflops": "{:g} GFLOP/s", "share": "{:.0%}"}
    amounts = [form.format(change[key]) for key, form in units.items() if key in change]
    failed = [f"(failed: {change['error']})"] if "error" in change else []
    return " ".join([change["do"], change["host"], *amounts, *failed])


def plan_words(plan: Mapping[str, Any]) -> str:
    """Return what a plan is, e.g. "row/kv on pi1, pi2"."""
    return f"{'/'.join([plan['strategy'], *plan['options'].values()])} on {', '.join(plan['devices'])}"
