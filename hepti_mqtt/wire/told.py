"""What the planner tells users in maps: the keys of a model's record and of an answer, and what one of them lacks.

A planner of another version may leave out what this one reads. What it says beyond is nobody's loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

from hepti_mqtt.errors import WireError
from hepti_mqtt.plan import Plan

RECORD: Final = (
    "boot", "active", "preparing", "pinned", "pinned_preparing", "spec", "directory", "in_flight", "unused",
    "candidates", "progress", "reason", "story", "error",
)  # fmt: skip
_KINDS: Final = {
    **dict.fromkeys(("pinned", "pinned_preparing", "candidates", "story"), list),
    **dict.fromkeys(("unused", "progress"), Mapping),
}
CANDIDATE: Final = (
    "name", "devices", "route", "wire", "wire_error", "predicted_ms", "expected_ms", "bytes", "feasible", "missing",
)  # fmt: skip
STEP: Final = ("time", "plan", "from", "to", "cause")
ERROR: Final = ("code", "message")
PLAN: Final = tuple(field.name for field in fields(Plan) if field.name != "replicas")  # which few plans have
# Of an answer what `hepti infer` shows.
ANSWER: Final = (
    "id", "model", "result", "plan", "tokens", "compute_ms", "wait_ms", "bytes_on_wire", "predicted_bytes",
    "predicted_ms",
)  # fmt: skip
TOKEN: Final = ("index", "token", "text")  # of each of them, before the answer
ANSWER_PLAN: Final = ("id", "strategy", "options", "wire", "weights", "route", "devices")


def other_version(what: str) -> WireError:
    """Return the error for what a planner tells otherwise than this version reads it."""
    return WireError(f"{what}: the planner is of another version than this program; update one of them")


def record_lacks(record: Mapping[str, Any]) -> str | None:
    """Return what a record of a model's plans lacks, None if it has all that this version reads."""
    for key in RECORD:
        if key not in record or not isinstance(record[key], _KINDS.get(key, object)):
            return key
    own = (record["active"], record["preparing"])
    plans = [plan for plan in (*own, *record["pinned"], *record["pinned_preparing"]) if plan is not None]
    errors = [] if record["error"] is None else [record["error"]]
    parts = ((plans, PLAN), (record["candidates"], CANDIDATE), (record["story"], STEP), (errors, ERROR))
    return next((missing for told, keys in parts for part in told if (missing := _missing(part, keys))), None)


def answer_lacks(answer: Mapping[str, Any]) -> str | None:
    """Return what an answer lacks, None if it has all that this version reads."""
    return _missing(answer, ANSWER) or _missing(answer["plan"], ANSWER_PLAN)


def _missing(part: Any, keys: Sequence[str]) -> str | None:
    """Return the first of `keys` that a map does not have; of what is no map that is the first."""
    return next((key for key in keys if not isinstance(part, Mapping) or key not in part), None)
