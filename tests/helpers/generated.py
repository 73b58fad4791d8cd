"""Texts that a divided decoder writes on a `Swarm`, and those of whole passes of the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from sites import always, plan, tensors
from swarm import Swarm

from hepti_mqtt import models
from hepti_mqtt.core.spec import Want
from hepti_mqtt.models.generation import LIKELIEST, TokenRules
from hepti_mqtt.runtime.coordinator.batches import Batch
from hepti_mqtt.runtime.coordinator.guesses import Guesses
from hepti_mqtt.runtime.coordinator.texts import Generation

Prompt = Sequence[int] | np.ndarray


def greedy(prompt: Prompt, most: int, spec: Any, rules: TokenRules = LIKELIEST) -> tuple[list[int], list[np.ndarray]]:
    """Return the tokens and the logits of each step by whole passes of the reference."""
    tokens: list[int] = []
    logits = []
    while len(tokens) < most and not rules.ends(tokens):
        shape, inputs = models.single_sequence(spec, np.array([*prompt, *tokens], np.int32))
        logits.append(models.reference(spec, tensors(spec), inputs, shape)[1])
        tokens.append(rules.choose(logits[-1], tokens, rules.temperatures[0])[0])
    return tokens, logits


def site(spec: Any, method: str, weights: Sequence[float], **network: Any) -> Swarm:
    """Return devices that divide a model by a method and shares, with room for several texts."""
    devices = {f"d{i}": (1e9, 1 << 30) for i in range(len(weights))}
    decider = always(plan(spec, (method, {}), weights))
    return Swarm(spec, tensors(spec), devices, **{"decider": decider, "jitter_s": 0.01, **network})


def generation(
    spec: Any,
    prompt: Prompt,
    most: int,
    rules: TokenRules = LIKELIEST,
    want: Want = "task",
    guesses: Guesses | None = None,
) -> tuple[Generation, Batch]:
    """Return a text of at most so many tokens, and its first batch."""
    shape, inputs = models.single_sequence(spec, np.array(prompt, np.int32), tokens=len(prompt) + most)
    shape = shape.with_want(want)
    text = Generation(tuple(map(int, prompt)), most, shape, rules, guesses=guesses, vocab=spec.head.outputs)
    return text, Batch(shape, inputs)


def begin(swarm: Swarm, name: object, prompt: Prompt, most: int, **how: Any) -> None:
    """Request a text; how: arguments of `generation`."""
    text, first = generation(swarm.spec, prompt, most, **how)
    swarm.begin(name, first, text)


def finish(swarm: Swarm, *names: object) -> None:
    """Run a site until these texts are written."""
    swarm.run(300, until=lambda: all(n in swarm.answers or n in swarm.errors for n in names))
    assert not swarm.errors.keys() & set(names), (swarm.errors, [n.text for n in swarm.notes])
