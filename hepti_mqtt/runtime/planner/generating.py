"""Requests that generate: a token as soon as a run's output is there, the next run at once, the reports as they come.

An output needs every op of every device of its run (a test of all methods says so). So whoever has it knows that all of
them have cached their rows, and the next run finds them; what is still on its way are reports. They are counted when
they come. A token that was told cannot be taken back: if its run turns out to have been forged it is computed again,
and another one in its place is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from hepti_mqtt.errors import HeptiError, RemoteError
from hepti_mqtt.plan import Plan
from hepti_mqtt.runtime.planner.commands import Answer, CoordinatorCommand, Token
from hepti_mqtt.runtime.planner.flight import Array, Job, Run, RunStats, likeliest
from hepti_mqtt.runtime.planner.model_state import ModelState

UNREPORTED: Final = 4  # runs on a device whose reports alone are missing, and that take no room of others


class Generating:
    """The steps of requests that generate. cancel: takes a run back; end: refuses a request."""

    def __init__(
        self,
        cancel: Callable[[ModelState, Run], list[CoordinatorCommand]],
        end: Callable[[ModelState, Job, HeptiError], list[CoordinatorCommand]],
    ) -> None:
        self._cancel, self._end = cancel, end

    def early(self, model: ModelState, run: Run) -> list[CoordinatorCommand]:
        """Go on with the output of a run some of whose reports are missing; no token follows from some outputs."""
        if not run.jobs or not _usable(run.output()):
            return []
        generation = run.items[0].job.generation
        assert generation is not None
        run.early, run.place = run.stats(), len(generation.tokens)
        return self._step(model, run, run.early)

    def reported(self, model: ModelState, run: Run, stats: RunStats, tries: int) -> list[CoordinatorCommand]:
        """Take the reports of a run that is over, and its output if nothing went on with it before."""
        job = run.items[0].job
        generation = job.generation
        assert generation is not None
        if job.over:
            return []
        if run.place is None:
            return self._step(model, run, stats)
        if likeliest(run.output()) != generation.tokens[run.place]:  # the reports say that a part of it was forged
            return self.doubt(model, run, RemoteError("parts of an answer are not those that devices have sent"), tries)
        job.stats[run.place] = stats
        return self.answer(model, run)

    def answer(self, model: ModelState, run: Run) -> list[CoordinatorCommand]:
        """Answer the request of a run if all tokens are there, and nothing that it waits for."""
        job = run.items[0].job
        if job.over or job.generation is None or not job.generation.done:
            return []
        if job.report and any(other.items[0].job is job for other in model.runs.values()):
            return []
        job.over = True
        return [Answer(job, model.plans.whole(job.stats[-1].plan), tuple(job.stats))]

    def doubt(self, model: ModelState, run: Run, error: HeptiError, tries: int) -> list[CoordinatorCommand]:
        """Take back what followed from a run's output, which may be forged, and compute it again.

        The request ends with the error after so many tries.
        """
        item = run.items[0]
        job, place = item.job, run.place
        assert job.generation is not None
        assert place is not None
        if job.over:
            return self._cancel(model, run)
        job.generation.take_back(place)
        del job.stats[place:]
        out: list[CoordinatorCommand] = []
        for later in [r for r in model.runs.values() if r.items[0] is item and r.admission >= run.admission]:
            out += self._cancel(model, later)
        if any(waiting is item for waiting in model.queue):
            model.queue.take([item])
        job.attempts[item.chunk] += 1
        if job.attempts[item.chunk] >= tries:
            return out + self._end(model, job, error)
        model.queue.add_first([item])
        return out

    def _step(self, model: ModelState, run: Run, stats: RunStats) -> list[CoordinatorCommand]:
        """Take a token; queue the next run of its session before all others, so that few sessions are open at once."""
        item, logits = run.items[0], run.output()
        job, generation = item.job, item.job.generation
        assert generation is not None
        if not _usable(logits):
            error = RemoteError(f"the devices answered with {list(logits.shape)} numbers that no token follows from")
            return self._end(model, job, error)
        place, told = len(generation.tokens), generation.told
        token = generation.take(logits)
        job.stats.append(stats)
        out: list[CoordinatorCommand] = []
        if place >= len(told):
            job.attempts.clear()
            out.append(Token(job, place, tuple(generation.tokens)))
        elif token != told[place]:
            text = f"token {place} was told as {told[place]} and is {token} by a second answer; ask again"
            return self._end(model, job, RemoteError(f"{text}, and see `hepti devices` for devices that lie"))
        if not generation.done:
            model.queue.add_first([item])
        return out + self.answer(model, run)


def taking_room(runs: list[Run], plan: Plan) -> list[Run]:
    """Return those of a model's runs that take room on devices of a plan: that compute, or lack reports beyond a few.

    What lacks reports alone takes no room on devices any more; but it is remembered here, so there is a bound.
    """
    here = [run for run in runs if not set(run.plan.devices).isdisjoint(plan.devices)]
    return [run for run in here if run.computes] + [run for run in here if not run.computes][UNREPORTED:]


def _usable(logits: Array) -> bool:
    return logits.ndim == 2 and len(logits) == 1 and bool(np.isfinite(logits).all())
