"""Texts of several users that are made in one run are those that each would have had alone."""

from __future__ import annotations

import numpy as np
import pytest
from sites import always, plan, tensors
from swarm import Swarm

from hepti_mqtt import models
from hepti_mqtt.checkpoint.make import spec_of_kind

from hepti_mqtt.runtime.coordinator.requests import Batching

USERS = 8


def site(kind: str, method: str, weights: tuple[float, ...], together: int = 16, **network: object) -> Swarm:
    spec = spec_of_kind(kind)
    devices = {f"d{i}": (1e9, 1 << 30) for i in range(len(weights))}
    decider = always(plan(spec, (method, {}), weights))
    return Swarm(spec, tensors(spec), devices, decider=decider, batching=Batching(together), **network)


def prompts(spec: object, count: int = USERS) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, spec.text.vocab, int(rng.integers(1, 12))).astype(np.int32) for _ in range(count)]


def greedy(spec: object, prompt: np.ndarray, most: int) -> list[int]:
    ids = prompt.tolist()
    for _ in range(most):
        shape, inputs = models.single_sequence(spec, np.array(ids, np.int32))
        ids.append(int(models.reference(spec, tensors(spec), inputs, shape)[1].argmax()))
    return ids[len(prompt) :]


def finish(swarm: Swarm, names: list[object]) -> None:
    swarm.run(300, until=lambda: all(n in swarm.answers or n in swarm.errors for n in names))
    assert not swarm.errors, (swarm.errors, [n.text for n in swarm.notes])


@pytest.mark.parametrize(
    ("kind", "method", "weights"),
    [("tiny-gpt2", "decoder", (1.0, 2.0)), ("tiny-llama", "single", (1.0,)), ("tiny-qwen3-text", "decoder", (1.0, 1.0))],
)
def test_texts_of_eight_users_are_those_of_each_alone(kind, method, weights):
    swarm = site(kind, method, weights, duplicates=0.2, jitter_s=0.01)
    asked = {i: (prompt, 4 + i % 3 * 3) for i, prompt in enumerate(prompts(swarm.spec))}
    for name, (prompt, most) in asked.items():
        swarm.generate(name, swarm.spec, prompt, most)
    finish(swarm, list(asked))
    sizes = []
    for name, (prompt, most) in asked.items():
        (answer, stats), *_ = swarm.answers[name]
        assert answer.tolist() == greedy(swarm.spec, prompt, most), name
        sizes += [s.requests for s in stats]
    assert max(sizes) >= 4
