"""The Programs of a device's plans: the order of builds, and the runs that wait for a Program.

Building takes as long as many ops, so the shell calls `build` on another thread, one Program at a time: first Programs
that runs wait for, then urgent ones (a plan or a session needs them next), then predicted ones while idle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from hepti_mqtt.core.errors import HeptiError, PlanError
from hepti_mqtt.core.spec import RequestShape
from hepti_mqtt.kernels import Workers
from hepti_mqtt.lowering.handover import HandoverError
from hepti_mqtt.protocol.frames import DecoderSession, Frame
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.runtime.worker.executor import bind
from hepti_mqtt.runtime.worker.interface import AnalysePrepare, BuildProgram, PrepareAnalysed, ProgramBuilt
from hepti_mqtt.runtime.worker.residents import Continuation, PlanKey, ProgramKey, ResidentPlan, analyse_prepare
from hepti_mqtt.strategies.plan_programs import device_program, handover_program


def build(order: BuildProgram, device: str, workers: Workers) -> ProgramBuilt:
    """Return a device's Program bound to its weights, or the error; safe on any thread."""
    spec, plan, shape = order.spec, order.plan, order.shape
    try:
        if isinstance(shape, Continuation):
            rest = handover_program(spec, shape.before, shape.after, shape.shape, shape.block, device)
            return ProgramBuilt(order.number, bind(rest.program, order.weights, workers, rest.taken))
        return ProgramBuilt(order.number, bind(device_program(spec, plan, shape, device), order.weights, workers))
    except HandoverError as error:
        return ProgramBuilt(order.number, PlanError(str(error)))
    except Exception as error:  # reported to the planner, or logged by the session
        return ProgramBuilt(order.number, error)


def analyse(order: AnalysePrepare, device: str, topics: Topics) -> PrepareAnalysed:
    """Return the resident plan of a Prepare, or the error; safe on any thread."""
    try:
        return PrepareAnalysed(order.prepare, analyse_prepare(order.prepare, device, topics))
    except HeptiError as error:
        return PrepareAnalysed(order.prepare, error)
    except Exception as error:  # reported to the planner
        return PrepareAnalysed(order.prepare, PlanError(f"the plan cannot be prepared ({error!r})"), error)


def next_step(shape: RequestShape, sessions: Sequence[DecoderSession]) -> RequestShape | None:
    """Return the shape of the next run of a session, None after the last run or without a session."""
    return shape.decode_step(1) if any(s.number and not s.final for s in sessions) else None


class ProgramBuildQueue:
    """The current order, and the work frames of runs that wait for a Program.

    counters: `programs_built_ahead`, and `programs_built_late` if a run waited.
    """

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self._order: tuple[BuildProgram, ResidentPlan] | None = None
        self._number = 0
        self._waiting: dict[int, tuple[Frame, ProgramKey]] = {}

    def waiting_frame(self, run_id: int) -> Frame | None:
        """Return the work frame of a waiting run, None if it does not wait."""
        frame, _ = self._waiting.get(run_id, (None, None))
        return frame

    def enqueue(self, frame: Frame, shape: ProgramKey) -> None:
        """Let a run wait for its Program."""
        self._waiting[frame.run_id] = (frame, shape)

    def waiting(self) -> list[tuple[int, PlanKey]]:
        """Return the waiting runs and their plan keys."""
        return [(run_id, (frame.model, frame.plan_version)) for run_id, (frame, _) in self._waiting.items()]

    def drop(self, run_id: int) -> None:
        """Drop a waiting run."""
        self._waiting.pop(run_id, None)

    def drop_plan(self, key: PlanKey) -> None:
        """Drop the waiting runs of a plan, and the current order if it is for the plan."""
        for run_id in [a for a, (frame, _) in self._waiting.items() if (frame.model, frame.plan_version) == key]:
            del self._waiting[run_id]
        if self._order is not None and self._order[1].key == key:
            self._order = None

    def next_order(self, residents: Iterable[ResidentPlan], idle: bool) -> BuildProgram | None:
        """Return the next order; None during a build, or if none is needed. idle: no run is active."""
        if self._order is not None:
            return None
        loaded = [r for r in residents if r.weights is not None]
        late = self._awaited(loaded)
        chosen: tuple[ResidentPlan, ProgramKey] | None = late
        chosen = chosen or next(((r, r.urgent_shapes[0]) for r in loaded if r.urgent_shapes), None)
        if chosen is None and idle:
            chosen = next(((r, r.prebuild_shapes[0]) for r in loaded if r.prebuild_shapes and r.ready), None)
        if chosen is None:
            return None
        resident, shape = chosen
        assert resident.weights is not None
        self._number += 1
        awaited = late is not None or (idle and bool(resident.urgent_shapes))
        order = BuildProgram(self._number, resident.spec, resident.plan, shape, resident.weights, awaited)
        self._order = order, resident
        return order

    def complete(self, event: ProgramBuilt) -> tuple[ResidentPlan, ProgramKey, list[Frame]] | None:
        """Cache a Program; return its plan, shape and waiting runs, None if its plan is gone."""
        if self._order is None or self._order[0].number != event.number:
            return None
        (order, resident), self._order = self._order, None
        shape = order.shape
        for shapes in (resident.urgent_shapes, resident.prebuild_shapes):
            if not isinstance(shape, Continuation) and shape in shapes:
                shapes.remove(shape)
        late = [f for f, s in self._waiting.values() if s == shape and (f.model, f.plan_version) == resident.key]
        for frame in late:
            del self._waiting[frame.run_id]
        if not isinstance(event.result, Exception):
            self._counters["programs_built_late" if late else "programs_built_ahead"] += 1
            resident.programs[shape] = event.result
        return resident, shape, late

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        assert self._order is not None or not self._waiting

    def _awaited(self, loaded: Iterable[ResidentPlan]) -> tuple[ResidentPlan, ProgramKey] | None:
        """Return the plan and shape of the first waiting run of a loaded plan."""
        by_key = {r.key: r for r in loaded}
        waiting = ((by_key.get((f.model, f.plan_version)), shape) for f, shape in self._waiting.values())
        return next(((resident, shape) for resident, shape in waiting if resident is not None), None)
