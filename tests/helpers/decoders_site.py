"""A planner whose devices are scripted and generate: each token follows from those before it by a sum."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from scripted_site import ROW, SPEC, Site

from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.models.shapes import TokenBatch
from hepti_mqtt.protocol import frames
from hepti_mqtt.runtime.coordinator import interface
from hepti_mqtt.runtime.coordinator.batches import Batch
from hepti_mqtt.runtime.coordinator.requests import Request, RequestKey
from hepti_mqtt.runtime.coordinator.texts import Generation

PROMPT = (3, 1, 4, 1)


def following(ids: list[int]) -> int:
    """Return the token that the scripted model has behind some ids."""
    return (7 * sum(ids) + len(ids)) % SPEC.hidden


def expected(most: int) -> list[int]:
    ids = list(PROMPT)
    for _ in range(most):
        ids.append(following(ids))
    return ids[len(PROMPT) :]


class Decoders(Site):
    """Scripted devices with caches; outputs and reports leave them when the test says so.

    orderly: a run comes to no device that has not computed the one before.
    """

    def __init__(self, orderly: bool = True, **options) -> None:
        super().__init__(**({"pins": ROW} | options))
        self.orderly, self.compute_us = orderly, 2000
        self.caches: dict[tuple[str, PlanVersion, int], list[int]] = {}
        self.computed: defaultdict[int, set[str]] = defaultdict(set)
        self.published: defaultdict[str, list[int]] = defaultdict(list)
        self.plan_by_version: dict[PlanVersion, Plan] = {}

    def _note(self, command: interface.CoordinatorCommand) -> None:
        super()._note(command)
        if isinstance(command, interface.PublishPlan):
            shown = [p for p in (command.active, *command.pinned) if p is not None]
            self.plan_by_version |= {run.version: run for whole in shown for run in whole.executables}
        elif isinstance(command, interface.TokenReady):
            published = self.published[command.request.key.id]
            assert command.index == len(published), "none comes twice, none is left out"
            published.append(command.tokens[-1])
        elif isinstance(command, interface.Publish) and "/work/" in command.topic and self.orderly:
            frame = frames.decode(command.payload)
            at, _ = self.inputs_of(frame.run_id)
            for device in self.plan_of(frame.run_id).devices:
                assert len(self.cache(device, frame.run_id)) >= at, "a step before the last one has been computed"

    def plan_of(self, run_id: int) -> Plan:
        return self.plan_by_version[self.work[run_id].plan_version]

    def inputs_of(self, run_id: int) -> tuple[int, list[int]]:
        at, *ids = frames.decode_work(self.work[run_id])[1].tolist()
        return at, ids

    def cache(self, device: str, run_id: int) -> list[int]:
        frame = self.work[run_id]
        return self.caches.setdefault((device, frame.plan_version, frames.decode_sessions(frame)[0].number), [])

    def compute(self, run_id: int, *devices: str) -> None:
        """Let devices compute their part of a run, once, or say that they have lost its session."""
        at, ids = self.inputs_of(run_id)
        for device in devices or self.plan_of(run_id).devices:
            if device in self.computed[run_id]:
                continue  # again it would cut what a later run of the session has added to the cache
            cache = self.cache(device, run_id)
            if len(cache) < at:
                self.run_failed(device, run_id, "session")
            else:
                cache[at:] = ids
                self.computed[run_id].add(device)

    def able(self) -> list[int]:
        """Return the runs whose output can be sent."""
        return [a for a in self.work if self.computed[a] == set(self.plan_of(a).devices)]

    def output(self, run_id: int, forged: int | None = None, source: str = "", part: int = 0) -> None:
        head = source or self.plan_of(run_id).root
        logits = np.zeros((1, SPEC.hidden), np.float32)
        logits[0, following(self.cache(head, run_id)) if forged is None else forged] = 1.0
        self.hear(self.part(run_id, head, logits, part=part))

    def report(self, run_id: int, *devices: str) -> None:
        plan = self.plan_of(run_id)
        for device in devices or plan.devices:
            self.hear(self.done(run_id, device, int(device == plan.root)))

    def step(self, reported: bool = True) -> None:
        """Let the last run that was asked for be computed and answered."""
        last = max(self.work)
        self.compute(last)
        self.output(last)
        if reported:
            self.report(last)

    def ask(self, name: str = "r", most: int = 3, report: bool = False, within: float = 1e6) -> Request:
        shape = TokenBatch((len(PROMPT),), cache=16)
        chunk = Batch(shape, np.array([0, *PROMPT], np.int32))
        generation = Generation(PROMPT, most, shape)
        key = RequestKey("m", "c", name)
        job = Request(key, (chunk,), None, self.now + within, generation=generation, wants_report=report)
        self.event(interface.RequestArrived(job))
        return job

    @property
    def running(self) -> set[int]:
        return set(self.session.groups.default("m").runs)

    def tokens(self, name: str = "r") -> list[int]:
        return self.answers[name].request.output().tolist()


def running(**options) -> Decoders:
    site = Decoders(**options)
    site.join("a", "b")
    site.settle()
    return site
