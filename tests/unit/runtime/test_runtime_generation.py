"""A generation continues when the output has arrived; late reports are counted, and nothing waits forever."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_site import ROW, SPEC, Site, everyone

from hepti_mqtt.core.errors import DeadlineError, PlanError, RemoteError
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.models.shapes import TokenBatch
from hepti_mqtt.protocol import frames
from hepti_mqtt.runtime.coordinator import interface
from hepti_mqtt.runtime.coordinator.batches import Batch
from hepti_mqtt.runtime.coordinator.requests import Request, RequestKey
from hepti_mqtt.runtime.coordinator.run_tracker import MAX_ATTEMPTS
from hepti_mqtt.runtime.coordinator.runs import MAX_UNREPORTED_RUNS
from hepti_mqtt.runtime.coordinator.texts import Generation

PROMPT = (3, 1, 4, 1)


def following(ids):
    """Return the token that the scripted model has behind some ids."""
    return (7 * sum(ids) + len(ids)) % SPEC.hidden


def expected(most):
    ids = list(PROMPT)
    for _ in range(most):
        ids.append(following(ids))
    return ids[len(PROMPT) :]


class Decoders(Site):
    """Scripted devices with caches; outputs and reports leave them when the test says so.

    orderly: a run comes to no device that has not computed the one before.
    """

    def __init__(self, orderly=True, **options):
        super().__init__(**({"pins": ROW} | options))
        self.orderly, self.compute_us = orderly, 2000
        self.caches: dict[tuple[str, PlanVersion, int], list[int]] = {}
        self.computed: defaultdict[int, set[str]] = defaultdict(set)
        self.published: defaultdict[str, list[int]] = defaultdict(list)
        self.plan_by_version: dict[PlanVersion, Plan] = {}

    def _note(self, command):
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

    def plan_of(self, run_id):
        return self.plan_by_version[self.work[run_id].plan_version]

    def inputs_of(self, run_id):
        at, *ids = frames.decode_work(self.work[run_id])[1].tolist()
        return at, ids

    def cache(self, device, run_id):
        frame = self.work[run_id]
        return self.caches.setdefault((device, frame.plan_version, frames.decode_sessions(frame)[0].number), [])

    def compute(self, run_id, *devices):
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

    def able(self):
        """Return the runs whose output can be sent."""
        return [a for a in self.work if self.computed[a] == set(self.plan_of(a).devices)]

    def output(self, run_id, forged=None, source="", part=0):
        head = source or self.plan_of(run_id).root
        logits = np.zeros((1, SPEC.hidden), np.float32)
        logits[0, following(self.cache(head, run_id)) if forged is None else forged] = 1.0
        self.hear(self.part(run_id, head, logits, part=part))

    def report(self, run_id, *devices):
        plan = self.plan_of(run_id)
        for device in devices or plan.devices:
            self.hear(self.done(run_id, device, int(device == plan.root)))

    def step(self, reported=True):
        """Let the last run that was asked for be computed and answered."""
        last = max(self.work)
        self.compute(last)
        self.output(last)
        if reported:
            self.report(last)

    def ask(self, name="r", most=3, report=False, within=1e6):
        shape = TokenBatch((len(PROMPT),), cache=16)
        chunk = Batch(shape, np.array([0, *PROMPT], np.int32))
        generation = Generation(PROMPT, most, shape)
        key = RequestKey("m", "c", name)
        job = Request(key, (chunk,), None, self.now + within, generation=generation, wants_report=report)
        self.event(interface.RequestArrived(job))
        return job

    @property
    def running(self):
        return set(self.session.groups.default("m").runs)

    def tokens(self, name="r"):
        return self.answers[name].request.output().tolist()


def running(**options):
    site = Decoders(**options)
    site.join("a", "b")
    site.settle()
    return site


def test_the_next_step_and_the_answer_leave_at_the_output_and_late_reports_are_counted():
    site = running()
    job = site.ask(most=3)
    for number in (1, 2, 3):
        assert max(site.work) == number
        site.step(reported=False)
    assert site.tokens() == site.published["r"] == expected(3)
    assert [s.reported for s in site.answers["r"].stats] == [False] * 3
    assert site.running == {1, 2, 3}, "the reports are still to come"
    for number in (2, 1, 3):
        site.report(number)
    assert not site.running
    assert not site.session.counters["late"]
    assert job.finished


def test_a_request_with_wants_report_has_tokens_immediately_and_the_answer_with_all_reports():
    site = running()
    site.ask(most=3, report=True)
    for _ in range(3):
        site.step(reported=False)
    assert site.published["r"] == expected(3)
    site.report(3)
    site.report(1)
    assert not site.answers
    site.report(2)
    assert all(s.reported for s in site.answers["r"].stats)
    assert not site.running


@pytest.mark.parametrize("lost", ["reports", "a device", "a connection"])
@pytest.mark.parametrize("whole", [True, False], ids=["all tokens", "in between"])
def test_missing_reports_do_not_delay_a_request(lost, whole):
    site = running(pins=None, decider=everyone)
    site.ask(most=2, report=True)
    for _ in range(2 if whole else 1):
        site.step(reported=False)
    if lost == "a device":
        site.leave("b")
    elif lost == "a connection":
        site.event(interface.BrokerState(online=False))
        site.event(interface.BrokerState(online=True))
    for _ in range(40):
        site.tick(1.0)
        site.ready()
        for run in sorted(site.running - {1, 2}):
            site.compute(run)
            site.output(run)
            site.report(run)
        if "r" in site.answers:
            break
    assert site.tokens() == site.published["r"] == expected(2)
    assert not site.answers["r"].stats[0].reported
    assert not site.running
    assert (max(site.work) == 2) == whole, "published tokens are not computed again"


def test_a_deadline_ends_a_request_that_waits_only_for_reports_and_one_with_an_active_run():
    site = running()
    site.ask("all", most=1, report=True, within=2.0)
    site.step(reported=False)
    site.ask("some", most=2, within=2.0)
    site.step(reported=False)
    site.tick(2.5)
    assert {name: type(error) for name, error in site.errors.items()} == dict.fromkeys(("all", "some"), DeadlineError)
    assert site.running == {1, 2}
    site.report(1)
    site.report(2)
    assert not site.running
    assert not site.session.counters["late"]


def test_the_number_of_steps_without_reports_is_limited():
    site = running()
    job = site.ask(most=12)
    while max(site.work) not in site.computed:
        site.step(reported=False)
    assert len(site.running) == MAX_UNREPORTED_RUNS + site.session.in_flight
    assert len(job.generation.text.tokens) == len(site.running)
    site.report(1)
    assert max(site.work) == MAX_UNREPORTED_RUNS + site.session.in_flight + 1
    while "r" not in site.answers:
        for run in sorted(site.running):
            site.compute(run)
            site.output(run)
            site.report(run)
    assert site.tokens() == expected(12)
    assert not site.running


def for_steps(question):
    """Decide for a plan that is optimised for steps of 0.1 s."""
    decision = everyone(question)
    chosen = replace(decision.chosen, plan=replace(decision.chosen.plan, predicted_s=0.1, predicted_tokens=1))
    return replace(decision, chosen=chosen)


def test_the_duration_of_steps_is_learned_although_the_next_one_has_begun():
    site = running(pins=None, decider=for_steps)
    site.ask(most=12)
    for number in range(1, 13):
        site.compute(number)
        site.now += 0.2
        site.output(number)
        assert max(site.work) == min(number + 1, 12)
        site.now += 0.05
        site.report(number)
    site.event(interface.Tick())
    learned = site.session.groups.default("m").durations.methods.corrections(site.now)
    assert learned.factor(site.plan) == pytest.approx(3.0, rel=0.1), "from its dispatch to its last report"


@pytest.mark.parametrize("what", ["numbers", "row", "width", "parts sent", "failure"])
def test_a_doubtful_token_is_computed_again_with_all_later_ones_and_published_once(what):
    site = running()
    site.ask(most=4)
    site.step()
    site.step(reported=False)
    site.compute(3)
    if what == "numbers":
        site.output(2, forged=0 if expected(2)[1] else 1)
    elif what == "row":
        site.hear(site.part(2, "a", np.zeros((1, SPEC.hidden), np.float32), row_start=1))
    elif what == "width":
        site.hear(site.part(2, "a", np.zeros((1, SPEC.hidden + 1), np.float32), part=1))
        site.report(2)
    elif what == "failure":
        site.run_failed("b", 2, "device")
    else:  # no device reports a part, so the output was forged
        site.hear(site.done(2, "a", 0), site.done(2, "b", 0), site.done(2, "a", 1))
    assert site.running == {4}, "the next step is cancelled, too"
    assert site.inputs_of(4) == (0, [*PROMPT])
    assert frames.decode_sessions(site.work[4])[0].number == 2
    for _ in range(4):
        site.step()
    assert site.tokens() == site.published["r"] == expected(4)
    assert [s.shape.size for s in site.answers["r"].stats] == [4, 4, 1, 1, 1]
    assert not site.running


def test_a_forged_token_that_was_published_ends_in_an_error():
    site = running(orderly=False)
    right = expected(1)[0]
    site.ask(most=4)
    site.compute(1)
    site.output(1, forged=(right + 1) % SPEC.hidden)
    assert site.published["r"] == [(right + 1) % SPEC.hidden]
    site.output(1)
    assert site.running == {3}
    site.step()
    assert isinstance(site.errors["r"], RemoteError)
    assert not site.running


def test_a_part_of_a_device_that_reports_no_parts_gives_no_token():
    site = running(orderly=False)
    site.ask(most=2)
    site.output(1, forged=(expected(1)[0] + 1) % SPEC.hidden, source="b", part=3)
    site.compute(1)
    site.output(1)
    site.report(1)
    assert site.session.counters["foreign_frame"] == 1
    site.step()
    assert isinstance(site.errors["r"], RemoteError)


def test_endless_contradictions_end_in_an_error():
    site = running()
    site.ask(most=4)
    for _ in range(MAX_ATTEMPTS):
        last = max(site.work)
        site.compute(last)
        site.output(last)
        site.output(last, forged=0 if expected(1)[0] else 1)
    assert isinstance(site.errors["r"], RemoteError)
    assert not site.running
    assert site.published["r"] == expected(1)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_give_no_token(bad):
    site = running()
    site.ask(most=2)
    site.hear(site.part(1, "a", np.full((1, SPEC.hidden), bad, np.float32)))
    assert not site.errors
    site.report(1)
    assert isinstance(site.errors["r"], RemoteError)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_generation_ends_once_with_its_tokens_under_random_events(data):
    in_flight = data.draw(st.sampled_from([1, 2, 3]))
    site = Decoders(pins=None, decider=everyone, in_flight=in_flight)
    boots, most_by_name = Counter[str](), dict[str, int]()
    site.join("a", "b")
    boots.update("ab")
    site.settle()
    acts = ["join", "leave", "tick", "ready", "ask", "offline", "broken", *["compute", "output", "report"] * 4]
    for _ in range(data.draw(st.integers(5, 60))):
        what, name = data.draw(st.sampled_from(acts)), data.draw(st.sampled_from("abc"))
        runs = sorted(site.running)
        if what == "join":
            boots[name] += 1
            for key in [key for key in site.caches if key[0] == name]:
                del site.caches[key]
            site.join(name, boot=boots[name])
        elif what == "leave" and name in site.boots:
            site.leave(name)
        elif what == "tick":
            site.tick(data.draw(st.sampled_from([0.1, 1.1, 5.0])))
        elif what == "ready":
            site.ready(name)
        elif what == "ask":
            most, report = data.draw(st.integers(1, 6)), data.draw(st.booleans())
            most_by_name[f"r{len(most_by_name)}"] = most
            site.ask(f"r{len(most_by_name) - 1}", most, report)
        elif what == "offline":
            site.event(interface.BrokerState(online=data.draw(st.booleans())))
        elif what == "broken" and runs and name in site.plan_of(runs[0]).devices:
            site.run_failed(
                name, data.draw(st.sampled_from(runs)), data.draw(st.sampled_from(["link", "wire", "device"]))
            )
        elif what == "compute" and runs:
            run = data.draw(st.sampled_from(runs))
            if name in site.plan_of(run).devices:
                site.compute(run, name)
        elif what == "output" and (able := [a for a in runs if a in site.able()]):
            site.output(data.draw(st.sampled_from(able)))
        elif what == "report" and (able := sorted(site.work)):
            run = data.draw(st.sampled_from(able))
            if name in site.computed[run]:
                site.report(run, name)
    site.event(interface.BrokerState(online=True))
    for _ in range(60):
        for name in "ab":
            if name not in site.boots:
                boots[name] += 1
                site.join(name, boot=boots[name])
        site.tick(1.0)
        site.ready()
        for run in sorted(site.running):
            site.compute(run)
        for run in sorted(site.running & set(site.able())):
            site.output(run)
        for run in sorted(site.running & set(site.able())):
            site.report(run)
    assert not site.running
    assert site.answers.keys() | site.errors.keys() == most_by_name.keys()
    assert all(isinstance(error, RemoteError | PlanError) for error in site.errors.values())
    for name, answer in site.answers.items():
        assert site.tokens(name) == site.published[name] == expected(most_by_name[name])
        assert len(answer.stats) >= most_by_name[name]
