"""Run a plan search: a question in, `Solved` out, whatever goes wrong.

With an accuracy budget the error of narrow wire dtypes is measured here too, on the search thread; requests meanwhile
run under the current plan, the first ones on the best device alone.
"""

from __future__ import annotations

import gc
import json
import logging
import threading
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from math import inf
from pathlib import Path
from typing import Any, Final

import platformdirs

from hepti_mqtt import __version__
from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.config.state import write_atomically
from hepti_mqtt.errors import HeptiError, PlanError
from hepti_mqtt.plan import NARROW_WIRE_DTYPES, Plan, WireDtype
from hepti_mqtt.planner import (
    decide_hurried,
    decide_within_accuracy,
    price_plans,
    simulate_plan,
    wire_errors,
    with_loads,
)
from hepti_mqtt.planner.candidates import WireErrorKey, wire_error_key
from hepti_mqtt.runtime.coordinator.interface import Solve, Solved
from hepti_mqtt.spec import Spec

_log = logging.getLogger(__name__)
_WIRE: Final[Mapping[str, WireDtype]] = {wire: wire for wire in NARROW_WIRE_DTYPES}
COLLECTED: Final = 20_000  # new objects between garbage collections, a few megabytes at most


def start_preloading() -> None:
    """Import what searches need while the planner connects; Numba takes longest."""
    threading.Thread(target=_load, name="planner-loads", daemon=True).start()


def _load() -> None:
    import_module("hepti_mqtt.kernels")
    # A search makes many objects, and each collection would scan all of Numba: a tenth to a sixth of a search.
    gc.freeze()
    # The collector finds next to nothing: running it after every 700 objects takes another tenth.
    gc.set_threshold(COLLECTED, 20, 50)


class WireAccuracy:
    """Measured errors of narrow wire dtypes of one model; tensors: its canonical ones, read on demand.

    kept: the file that keeps errors across restarts, None for no file.
    """

    def __init__(self, spec: Spec, tensors: Mapping[str, Any], kept: Path | None = None) -> None:
        self._spec, self._tensors, self._kept = spec, tensors, kept
        self.known: dict[WireErrorKey, float] = {} if kept is None else _read(kept)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> WireAccuracy:
        """Return that of a checkpoint; its errors are cached by digest and by version of Hepti."""
        name = f"{checkpoint.manifest.digest.hex()}-{__version__}.json"
        kept = Path(platformdirs.user_cache_dir("hepti")) / "accuracy" / name
        return cls(checkpoint.spec, checkpoint.tensors(), kept)

    def measure(self, plan: Plan) -> Mapping[WireDtype, float]:
        """Return the errors of narrow dtypes under a plan; infinity if the measurement fails, so that f32 stays."""
        try:
            found = wire_errors(self._spec, plan, self._tensors)
        except Exception:  # whatever it is, it must not leave the model without a plan
            _log.exception("cannot find how far narrow exchanges move the answers of %s", plan.model)
            return dict.fromkeys(NARROW_WIRE_DTYPES, inf)
        told = ", ".join(f"{wire} {error:.1e}" for wire, error in found.items())
        _log.info("%s: %s on %d devices moves answers by: %s", plan.model, plan.method, len(plan.devices), told)
        if self._kept is not None:
            _write(self._kept, self.known | {wire_error_key(plan, wire): error for wire, error in found.items()})
        return found


def _read(path: Path) -> dict[WireErrorKey, float]:
    """Return the cached errors; a missing or damaged file only slows down the first search."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        rows = json.loads(path.read_text())
        return {(str(method), int(count), _WIRE[wire]): float(error) for method, count, wire, error in rows}
    return {}


def _write(path: Path, known: Mapping[WireErrorKey, float]) -> None:
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps([[*key, error] for key, error in known.items()]).encode())


def solve(command: Solve, accuracy: WireAccuracy | None = None) -> Solved:
    """Return what a search finds, with the active plan's price under the same measurements, or why it finds nothing."""
    question = command.question
    if command.hurried:
        with suppress(Exception):  # whatever stands in the way: the whole search says it
            return Solved(command.model, command.ticket, decide_hurried(question), hurried=True)
    try:
        if command.plans:
            decision = price_plans(question, command.plans)
        else:
            accuracy = accuracy or WireAccuracy(question.spec, {})
            decision = decide_within_accuracy(question, accuracy.known, accuracy.measure)
        active = None
        if command.active is not None and set(command.active.devices) <= set(question.cluster.devices):
            active = simulate_plan(question, command.active)
        decision = with_loads(question, decision, active)
    except HeptiError as error:
        return Solved(command.model, command.ticket, None, error=error)
    except Exception as error:  # a mistake in a strategy must not leave requests without an end
        _log.exception("the search for a plan of %s failed", command.model)
        return Solved(command.model, command.ticket, None, error=PlanError(f"the search failed: {error!r}"))
    return Solved(command.model, command.ticket, decision, active)
