"""Run a plan search: a question in, `Solved` out, also after an error.

The search thread also measures errors of narrow wire dtypes (with an accuracy budget) and of narrow weights. Meanwhile,
requests run under the current plan; the first requests run on the best device alone.
"""

from __future__ import annotations

import gc
import json
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from hashlib import sha256
from importlib import import_module
from math import inf, isfinite
from pathlib import Path
from typing import Any, Final, get_args

import platformdirs

from hepti_mqtt import __version__
from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.config.options import MAX_WEIGHT_ERROR
from hepti_mqtt.config.state import write_atomically
from hepti_mqtt.core.errors import HeptiError, PlanError
from hepti_mqtt.core.plan import NARROW_WIRE_DTYPES, Plan, Quantised, WeightDtype, WireDtype
from hepti_mqtt.core.spec import Spec
from hepti_mqtt.planner import (
    Candidate,
    Decision,
    decide_hurried,
    decide_recalled,
    decide_within_accuracy,
    price_plans,
    simulate_plan,
    weight_error,
    wire_errors,
    with_loads,
)
from hepti_mqtt.planner.candidates import WireErrorKey, wire_error_key
from hepti_mqtt.planner.price import Budget
from hepti_mqtt.runtime.coordinator.interface import Solve, Solved
from hepti_mqtt.runtime.coordinator.search_kinds import SEARCHES, SearchKind

_log = logging.getLogger(__name__)
_WIRE: Final[Mapping[str, WireDtype]] = {wire: wire for wire in NARROW_WIRE_DTYPES}
_KEPT: Final[Mapping[str, WeightDtype]] = {dtype: dtype for dtype in get_args(WeightDtype)}
_QUANTISED: Final[Mapping[str, Quantised]] = {how: how for how in get_args(Quantised)}
_WEIGHTS: Final[Mapping[str, WeightDtype | Quantised]] = {**_KEPT, **_QUANTISED}
_OUTLIERS: Final = "a few of them are much larger than the others. Use --weights f16 or f32"
_MOVED: Final[Mapping[str, str]] = {"q8": "leave out --weights", "q4": "use --weights q8"}
COLLECTED: Final = 20_000  # objects allocated between two garbage collections


def start_preloading() -> None:
    """Import the modules of searches on a thread before the first search; Numba takes longest."""
    threading.Thread(target=_load, name="planner-loads", daemon=True).start()


@cache
def _load() -> None:
    import_module("hepti_mqtt.kernels")
    # A search allocates many objects, and each collection would scan all of Numba: a tenth to a sixth of a search.
    gc.freeze()
    # Collections free almost nothing: a collection per 700 objects takes another tenth.
    gc.set_threshold(COLLECTED, 20, 50)


class MeasuredErrors:
    """Relative errors of a model's answers caused by narrow dtypes.

    tensors: canonical tensors, read on demand. kept: file of the errors across restarts, None for no file.
    max_weight_error: limit for narrow weights. originals: tensors before quantisation.
    """

    def __init__(
        self,
        spec: Spec,
        tensors: Mapping[str, Any],
        kept: Path | None = None,
        max_weight_error: float = MAX_WEIGHT_ERROR,
        originals: Mapping[str, Any] | None = None,
    ) -> None:
        self._spec, self._tensors, self._kept, self._max_weight_error = spec, tensors, kept, max_weight_error
        self._originals = originals
        self.wire: dict[WireErrorKey, float] = {}  #: errors of narrow wire dtypes
        self.weights: dict[WeightDtype | Quantised, float] = {}  #: errors of narrow weights
        self._measuring = threading.Lock()  # hurried and whole searches run on different threads
        self._read()

    @classmethod
    def of(cls, checkpoint: Checkpoint, max_weight_error: float = MAX_WEIGHT_ERROR) -> MeasuredErrors:
        """Return the errors of a checkpoint, cached by weights, spec and version of Hepti."""
        computed = sha256(repr(checkpoint.spec.to_dict()).encode()).hexdigest()[:16]
        name = f"{checkpoint.manifest.digest.hex()}-{computed}-{__version__}.json"
        kept = Path(platformdirs.user_cache_dir("hepti")) / "accuracy" / name
        return cls(checkpoint.spec, checkpoint.tensors(), kept, max_weight_error, checkpoint.tensors_as_stored())

    def measure_wire(self, plan: Plan) -> Mapping[WireDtype, float]:
        """Return the errors of narrow wires under a plan; infinity if the measurement fails, so that f32 stays."""
        try:
            errors = wire_errors(self._spec, plan, self._tensors)
        except Exception:  # no error may leave the model without a plan
            _log.exception("cannot measure the errors of narrow wire dtypes for %s", plan.model)
            return dict.fromkeys(NARROW_WIRE_DTYPES, inf)
        text = ", ".join(f"{wire} {error:.1e}" for wire, error in errors.items())
        _log.info("%s: %s on %d devices moves answers by: %s", plan.model, plan.method, len(plan.devices), text)
        self.wire.update({wire_error_key(plan, wire): error for wire, error in errors.items()})
        self._write()
        return errors

    def require_weights(self, weight_dtype: WeightDtype | Quantised) -> float:
        """Return the relative error of narrow or quantised weights; raises PlanError if it is too large."""
        with self._measuring:
            if weight_dtype not in self.weights:
                _log.info("measuring how far weights in %s move the answers", weight_dtype)
                kept = _KEPT.get(weight_dtype)  # None: the tensors are already quantised
                before = self._originals if kept is None else None
                self.weights[weight_dtype] = weight_error(self._spec, self._tensors, kept or "f32", before)
                _log.info("weights in %s move answers by %.1e", weight_dtype, self.weights[weight_dtype])
                self._write()
        error = self.weights[weight_dtype]
        if not isfinite(error):
            what = "f16 holds numbers up to 65,504, and this model has" if weight_dtype == "f16" else "this model has"
            raise PlanError(f"{what} weights or activations beyond what {weight_dtype} holds; use --weights f32")
        if error > self._max_weight_error:
            raise PlanError(
                f"weights in {weight_dtype} move an answer by {error:.2g} of it, more than {self._max_weight_error:g}: "
                f"{_MOVED.get(weight_dtype, _OUTLIERS)}, or accept that with --max-weight-error at the planner"
            )
        return error

    def _read(self) -> None:
        """Read the cached errors; a missing or damaged file only slows down the first search."""
        if self._kept is None:
            return
        try:
            data = json.loads(self._kept.read_text())
            wire = {(str(method), int(count), _WIRE[wire]): float(error) for method, count, wire, error in data["wire"]}
            weights = {_WEIGHTS[dtype]: float(error) for dtype, error in data["weights"].items()}
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            _log.warning("%s cannot be read, so errors of narrow numbers are measured again: %r", self._kept, error)
            return
        self.wire, self.weights = wire, weights

    def _write(self) -> None:
        if self._kept is None:
            return
        data = {"wire": [[*key, error] for key, error in self.wire.items()], "weights": self.weights}
        try:
            self._kept.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._kept, json.dumps(data).encode())
        except OSError as error:
            _log.warning("%s cannot be written, so the next start measures again: %s", self._kept, error)


def solve(command: Solve, accuracy: MeasuredErrors | None = None) -> Solved:
    """Return the result of a search, with the active plan's price under the same measurements, or its error."""
    try:
        decision, active, is_whole = _search(command, accuracy)
    except HeptiError as error:
        return Solved(command.model, command.ticket, None, error=error)
    except Exception as error:  # waiting requests need an answer, also after a bug in a strategy
        _log.exception("the search for a plan of %s failed", command.model)
        return Solved(command.model, command.ticket, None, error=PlanError(f"the search failed: {error!r}"))
    return Solved(command.model, command.ticket, decision, active, is_whole=is_whole)


def _search(command: Solve, accuracy: MeasuredErrors | None) -> tuple[Decision, Candidate | None, bool]:
    """Return the decision, the active plan's price, and whether the search covered all candidates."""
    question, kind = command.question, command.kind
    if question.weight_dtype != "f32" and accuracy is not None:
        question = replace(question, weight_error=accuracy.require_weights(question.weight_dtype))
    if command.recalled is not None:
        question = replace(question, errors={} if accuracy is None else accuracy.wire)
        return decide_recalled(question, command.recalled), None, False
    _load()
    if kind is SearchKind.HURRIED:
        # Plans with loaded weights need no budget, because they are priced first.
        is_first = question.active is None and not question.residents
        budget = Budget(SEARCHES[kind].budget_s if is_first else 0.0, time.thread_time)
        decision = with_loads(question, decide_hurried(replace(question, budget=budget)), None)
        return decision, None, is_first and question.accuracy is None and not budget.is_spent
    if kind is SearchKind.BRIEF:
        question = replace(question, budget=Budget(SEARCHES[kind].budget_s))
    if kind is SearchKind.NAMED:
        decision = price_plans(question, command.plans)
    else:
        accuracy = accuracy or MeasuredErrors(question.spec, {})
        decision = decide_within_accuracy(question, accuracy.wire, accuracy.measure_wire)
    active = None if command.active is None else simulate_plan(question, command.active)
    return with_loads(question, decision, active), active, kind is SearchKind.WHOLE
