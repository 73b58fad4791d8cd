"""Texts of several users in one run equal the texts that each user gets alone."""

from __future__ import annotations

import numpy as np
import pytest
from generated import begin, finish, greedy, site
from sites import everyone
from swarm import MODEL

from hepti_mqtt.checkpoint.make import spec_of_kind
from hepti_mqtt.models.generation import LIKELIEST, TokenRules
from hepti_mqtt.runtime.coordinator.fair_queue import Batching
from hepti_mqtt.runtime.coordinator.interface import RequestCancelled
from hepti_mqtt.runtime.coordinator.requests import RequestKey

USERS = 8
TOGETHER = {"batching": Batching(), "in_flight": 7}  # so that eight sessions of the longest text have room


def prompts(spec: object, count: int = USERS) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, spec.text.vocab, int(rng.integers(1, 12))).astype(np.int32) for _ in range(count)]


@pytest.mark.parametrize(
    ("kind", "method", "weights"),
    [
        ("tiny-gpt2", "decoder", (1.0, 2.0)),
        ("tiny-llama", "single", (1.0,)),
        ("tiny-qwen3-text", "decoder", (1.0, 1.0)),
    ],
)
def test_texts_of_eight_users_are_those_of_each_alone(kind, method, weights):
    swarm = site(spec_of_kind(kind), method, weights, duplicates=0.2, **TOGETHER)
    rng, texts = np.random.default_rng(1), {}
    for name, prompt in enumerate(prompts(swarm.spec)):
        most, seed = int(rng.integers(3, 14)), int(rng.integers(2))
        rules = TokenRules(temperatures=(1.5,), seed=name) if seed else LIKELIEST
        texts[name], _ = greedy(prompt, most, swarm.spec, rules)
        begin(swarm, name, prompt, most, rules=rules, want="task" if name == 5 else "candidates")
        swarm.run(float(rng.choice([0.0, 0.05])))  # they join at any moment
    finish(swarm, *texts)
    for name, text in texts.items():
        assert swarm.answers[name][0][0].tolist() == text, name
    runs = [stats for answer in swarm.answers.values() for stats in answer[0][1]]
    assert max(stats.requests for stats in runs) >= 4
    assert {len(stats.shape.sizes) for stats in runs} <= {1, 2, 4, 8}, "so that Programs are few"


@pytest.mark.parametrize("fault", ["a device", "two sessions", "a user leaves"])
def test_texts_go_on_when_something_is_lost(fault):
    swarm = site(spec_of_kind("tiny-gpt2"), "decoder", (1.0, 1.0, 1.0), decider=everyone(("decoder", {})), **TOGETHER)
    prompts_asked = prompts(swarm.spec, 5)
    for name, prompt in enumerate(prompts_asked):
        swarm.generate(name, swarm.spec, prompt, 16)
    swarm.run(60, until=lambda: all(len(swarm.tokens.get(name, ())) > 3 for name in range(5)))
    if fault == "a device":
        swarm.kill("d1")
    elif fault == "two sessions":
        held = swarm.hosts["d1"].session.runs.sessions
        for session in list(held._open)[:2]:
            held.end(session)
    else:
        swarm.tell_planner(RequestCancelled(RequestKey(MODEL, "user", "4")))
        prompts_asked.pop()
    finish(swarm, *range(len(prompts_asked)))
    for name, prompt in enumerate(prompts_asked):
        assert swarm.tokens[name] == list(enumerate(greedy(prompt, 16, swarm.spec)[0])), name
    begun = sum(len(prompt) > 8 for prompt in prompts_asked)
    long = [sum(s.shape.tokens > 8 for s in swarm.answers[name][0][1]) for name in range(len(prompts_asked))]
    again = {"a device": 5, "two sessions": 2, "a user leaves": 0}[fault]
    assert sum(long) <= begun + again, "the others keep their rows"
    refused = sum("no rows before" in note.text for note in swarm.notes)
    assert refused <= (fault == "two sessions"), "lost texts begin again immediately"
