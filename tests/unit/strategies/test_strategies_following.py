"""Steps that devices begin by themselves: the text is the same, and what nobody wants is stopped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from generated import generation, greedy
from sites import always, plan, tensors
from swarm import MODEL, Swarm

from hepti_mqtt.checkpoint.make import spec_of_kind
from hepti_mqtt.models.generation import LIKELIEST, Sampling, TokenRules
from hepti_mqtt.protocol import frames, messages
from hepti_mqtt.runtime.coordinator.fair_queue import Batching
from hepti_mqtt.runtime.coordinator.interface import Publish, RequestArrived, RequestCancelled
from hepti_mqtt.runtime.coordinator.requests import Request, RequestKey
from hepti_mqtt.runtime.coordinator.texts import Generation
from hepti_mqtt.runtime.worker import runs
from hepti_mqtt.runtime.worker.executor import Step

SPEC = spec_of_kind("tiny-qwen3-text")
PROMPT = (5, 9, 2, 7, 5)
MOST = 24


class Watched(Swarm):
    """A site that records the planner's messages to devices.

    late_s: delay of work frames; command_s: of commands to devices; root_s: of the root device's reports.
    """

    def __init__(self, count: int, late_s: float = 0.0, root_s: float = 0.0, command_s: float = 0.0, **options) -> None:
        devices = {f"d{i}": (1e9, 1 << 30) for i in range(count)}
        way = ("decoder", {}) if count > 1 else ("single", {})
        decider = always(plan(SPEC, way, (1.0,) * count))
        self.root_s, self.late_s, self.command_s = root_s, late_s, command_s
        self.following, self.stopped = list[int](), set[int]()
        super().__init__(SPEC, tensors(SPEC), devices, decider=decider, jitter_s=0.01, batching=Batching(), **options)

    def _planner_command(self, command) -> None:
        if isinstance(command, Publish) and "/work/" in command.topic:
            frame = frames.decode(command.payload)
            self.following += [frame.run_id] if frames.decode_followed(frame) else []
            self.after(self.late_s, lambda: Swarm._planner_command(self, command))
            return
        if isinstance(command, Publish) and command.topic.endswith("/cmd"):
            message, _ = messages.decode_sealed(command.payload)
            self.stopped |= {message.run_id} if isinstance(message, messages.Cancel) else set()
            self.after(self.command_s, lambda: Swarm._planner_command(self, command))
            return
        super()._planner_command(command)

    def _host_publish(self, name, publish) -> None:
        if name != "d0" or not publish.topic.endswith("/up"):
            super()._host_publish(name, publish)
            return
        copied = publish._replace(payload=publish.joined_payload, body=memoryview(b""))  # the next op changes the body
        self.after(self.root_s, lambda: Swarm._host_publish(self, name, copied))

    def write(self, name, rules=LIKELIEST, want="candidates", prompt=PROMPT, most=MOST, reported=True) -> None:
        wanted, first = generation(SPEC, prompt, most, rules, want)
        request = Request(
            RequestKey(MODEL, "user", name), (first,), name, None, generation=wanted, wants_report=reported
        )
        self.tell_planner(RequestArrived(request))

    def finish(self, *names: str) -> list[list[int]]:
        self.run(300, until=lambda: all(n in self.answers or n in self.errors for n in names))
        assert not self.errors, self.errors
        self.run(5)
        assert not any(host.session.runs.has_any for host in self.hosts.values() if host.alive), "all has ended"
        return [self.answers[name][0][0].tolist() for name in names]


def text(rules: TokenRules = LIKELIEST, prompt: Sequence[int] = PROMPT, most: int = MOST) -> list[int]:
    """Return the text by whole passes of the reference."""
    return greedy(prompt, most, SPEC, rules)[0]


DRAWN = TokenRules(temperatures=(0.3,), seed=3, sampling=Sampling(top_k=40, top_p=0.9, min_p=0.01))


@pytest.mark.parametrize(("count", "rules"), [(1, LIKELIEST), (2, LIKELIEST), (3, LIKELIEST), (1, DRAWN), (2, DRAWN)])
def test_every_step_but_the_first_begins_without_the_planner(count, rules):
    swarm = Watched(count)
    swarm.write("a", rules)
    assert swarm.finish("a") == [text(rules)]
    assert len(swarm.following) == MOST - 1
    assert not swarm.stopped


def test_where_candidates_leave_a_token_open_the_planner_decides():
    rules = TokenRules(temperatures=(2.5,), seed=1)
    swarm = Watched(2)
    swarm.write("a", rules)
    assert swarm.finish("a") == [text(rules)]


def test_a_slow_planner_does_not_slow_a_text_down_by_every_word():
    took = {}
    for want in ("candidates", "task"):  # logits are for the planner alone to choose from
        swarm = Watched(1, late_s=0.5)
        swarm.write("warm", want=want)
        swarm.finish("warm")
        began = swarm.now
        swarm.write("a", want=want)
        swarm.run(300, until=lambda swarm=swarm: "a" in swarm.answers)
        took[want] = swarm.now - began
    assert took["candidates"] < 0.7 * took["task"]


def test_a_text_that_ends_stops_what_was_begun_behind_it():
    rules = TokenRules(stops=lambda tokens: len(tokens) >= 9)
    swarm = Watched(2)
    swarm.write("a", rules)
    assert swarm.finish("a") == [text(rules)]
    assert swarm.stopped
    swarm.write("b")  # its beginning is in the cache of the first
    assert swarm.finish("b") == [text()]


def test_a_user_who_leaves_stops_what_was_begun():
    swarm = Watched(2)
    swarm.write("a")
    swarm.run(60, until=lambda: len(swarm.tokens.get("a", ())) > 5)
    swarm.tell_planner(RequestCancelled(RequestKey(MODEL, "user", "a")))
    swarm.run(1, until=lambda: "a" in swarm.errors)
    del swarm.errors["a"]
    swarm.finish()
    assert len(swarm.tokens["a"]) < MOST
    assert swarm.stopped
    swarm.write("b")
    assert swarm.finish("b") == [text()]


@pytest.mark.parametrize(
    ("rules", "want"),
    [
        (TokenRules(sampling=Sampling(repetition=1.5)), "candidates"),
        (TokenRules(never=(text()[3],)), "candidates"),
        (LIKELIEST, "task"),
    ],
)
def test_a_token_that_depends_on_more_waits_for_the_planner(rules, want):
    swarm = Watched(2)
    swarm.write("a", rules, want)
    assert swarm.finish("a") == [text(rules)]
    assert not swarm.following


def test_a_device_that_draws_another_token_than_the_planner_changes_no_text(monkeypatch):
    draws = []

    def once_another(draw, row, vocab):
        draws.append(draw)
        return (runs_drawn(draw, row, vocab) + (len(draws) == 4)) % vocab

    runs_drawn = runs.drawn_token
    monkeypatch.setattr(runs, "drawn_token", once_another)
    swarm = Watched(2)
    swarm.write("a", DRAWN)
    assert swarm.finish("a") == [text(DRAWN)]
    assert len(draws) > 4


@pytest.mark.parametrize("lost", ["d0", "d1"])
def test_a_device_that_dies_costs_no_token(lost):
    swarm = Watched(3)
    swarm.decider = always(plan(SPEC, ("decoder", {}), (1.0, 1.0, 1.0)))
    swarm.write("a")
    swarm.run(60, until=lambda: len(swarm.tokens.get("a", ())) > 5)
    swarm.kill(lost)
    swarm.join(lost, 1e9, 1 << 30)
    assert swarm.finish("a") == [text()]


def test_a_run_that_follows_none_that_is_known_is_refused():
    swarm = Watched(1)
    swarm.write("a")
    swarm.finish("a")
    host = swarm.hosts["d0"]
    (resident,) = host.session.plans.residents()
    wanted, _ = generation(SPEC, PROMPT, MOST, want="candidates")
    wanted.session.rows = len(PROMPT) - 1
    part, session, draw = wanted.following_step(0)
    follows = frames.Followed(998, (draw,))
    payload = frames.encode_work(
        MODEL, resident.plan.version, 999, part.shape, part.inputs, (session,), resident.frame_key, follows=follows
    )
    (failed,) = host.session.runs.start(resident, frames.decode(payload), swarm.now)
    assert messages.decode(failed.payload).code == "session"


@pytest.mark.parametrize(("count", "seed"), [(2, 2), (3, 8), (2, 10)])
def test_steps_ordered_ahead_for_a_text_change_no_text_that_takes_its_cache_over(count, seed):
    rng = np.random.default_rng(seed)
    prompt, stop = rng.integers(1, 50, 18).tolist(), 5
    ends = TokenRules(stops=lambda tokens: len(tokens) >= stop)
    swarm = Watched(count, command_s=0.2, in_flight=1, seed=seed)
    swarm.write("a", ends, prompt=prompt, most=20, reported=False)
    swarm.run(60, until=lambda: len(swarm.tokens.get("a", ())) == stop - 1)
    first = text(ends, prompt)
    again = [*prompt, *rng.integers(1, 50, 6).tolist()]  # its rows are those of the steps ordered ahead, and more
    swarm.write("b", prompt=again, most=6, reported=False)
    assert swarm.finish("a", "b") == [first, text(prompt=again, most=6)]
    assert swarm.stopped, "steps were ordered ahead"


def test_a_fault_of_the_planner_in_a_text_ends_its_request(monkeypatch):
    swarm = Watched(1)
    with monkeypatch.context() as faulty:
        faulty.setattr(Generation, "append_tokens", lambda *_: 1 // 0)
        swarm.write("a")
        swarm.run(60, until=lambda: "a" in swarm.errors)
    assert [error.code for error in swarm.errors.pop("a")] == ["remote"]
    swarm.write("b")
    assert swarm.finish("b") == [text()]


@pytest.mark.parametrize(("op", "root_s"), [(1, 0.0), (4, 0.3), (9, 0.0), (14, 0.3)])
def test_a_fault_in_a_step_that_devices_began_costs_no_token(op, root_s, monkeypatch):
    """The report of the fault meets the planner before, while or after it asks for the step."""
    ran, broken = Counter(), list[int]()
    run_op = Step.run

    def break_once(step, *args, **options):
        ran[step.run_id] += step.run_id in swarm.following
        if len(ran) == 6 and ran[step.run_id] == op and not broken:
            broken.append(step.run_id)
            raise OSError("a device fault")
        return run_op(step, *args, **options)

    monkeypatch.setattr(Step, "run", break_once)
    swarm = Watched(2, root_s=root_s)
    swarm.write("a")
    assert swarm.finish("a") == [text()]
    assert broken
    assert len(swarm.answers["a"]) == 1
    assert [place for place, _ in swarm.tokens["a"]] == list(range(MOST))
    assert "overdue" not in {note.kind for note in swarm.notes}, "nobody waits for the lost step"
    swarm.write("b")
    assert swarm.finish("b") == [text()]
