"""Runs of many rows in a layout of their own: prompts, guesses and several users in one session's cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
from generated import begin, finish, greedy, site
from sites import everyone, plan
from swarm import plan_of

from hepti_mqtt.checkpoint.make import spec_of_kind
from hepti_mqtt.cost.memory import weights_bytes
from hepti_mqtt.models.shapes import TokenBatch
from hepti_mqtt.runtime.coordinator.guesses import Guesses
from hepti_mqtt.strategies.plan_programs import device_programs, programs_digest, resident_weights

SPEC = spec_of_kind("tiny-llama")
CHUNK = 16
BEGINNING = [5, 9, 2, 7, 5, 9, 2, 7, 5, 9, 2, 11, 3] * 3


def in_layouts(layouts, rows):
    """Return a planner that divides a decoder over all devices, with these layouts and shares of rows."""
    divide = everyone(("decoder", {}))

    def decider(question):
        decision = divide(question)
        laid_out = decision.chosen.plan
        laid_out = replace(laid_out, layouts=layouts, shares={"rows": rows[: len(laid_out.devices)]})
        digest = programs_digest(question.spec, laid_out)
        return replace(decision, chosen=replace(decision.chosen, plan=laid_out), digest=digest)

    return decider


@pytest.mark.parametrize(
    ("layouts", "rows"),
    [
        ({"row": 1}, (1.0, 1.0, 1.0)),
        ({"row": 1}, (5.0, 1.0, 0.1)),
        ({"block": 1, "row": 4}, (1.0, 3.0, 2.0)),
    ],
)
def test_texts_are_the_same_whatever_layouts_their_runs_have(layouts, rows, monkeypatch):
    monkeypatch.setattr("hepti_mqtt.models.shapes.CHUNK_ROWS", CHUNK)
    swarm = site(SPEC, "decoder", rows, decider=in_layouts(layouts, rows), duplicates=0.2)
    prompts = {"first": [*BEGINNING, 1], "other": [*BEGINNING, 4, 8], "branch": [*BEGINNING, 6], "short": [3, 1, 4]}
    begin(swarm, "first", prompts["first"], 12, guesses=Guesses())
    finish(swarm, "first")
    assert plan_of(swarm).layouts == layouts
    for name in ("other", "branch", "short"):
        begin(swarm, name, prompts[name], 12, guesses=Guesses())
    finish(swarm, "other", "branch")
    rows_of = {name: sum(s.shape.tokens for s in swarm.answers[name][0][1]) for name in ("first", "other", "branch")}
    assert max(rows_of["other"], rows_of["branch"]) < 40 <= rows_of["first"], "they continue in the first text's cache"
    prompts["lost"] = BEGINNING[::-1]
    before = len(swarm.logits)
    begin(swarm, "lost", prompts["lost"], 12)
    swarm.run(60, until=lambda: len(swarm.logits) > before + 1)
    swarm.kill("d1")
    finish(swarm, *prompts)
    for name, prompt in prompts.items():
        assert swarm.answers[name][0][0].tolist() == greedy(prompt, 12, SPEC)[0], name
    assert plan_of(swarm).devices == ("d0", "d2")


def test_weights_of_all_layouts_are_those_of_the_plan():
    divided = plan(SPEC, ("decoder", {}), (1.0, 1.0, 1.0))
    ways = {name: replace(divided, layouts={name: 1} if name else {}) for name in ("", "block", "row")}
    kept = {name: [weights_bytes(resident_weights(SPEC, way, d)) for d in way.devices] for name, way in ways.items()}
    assert kept["block"] == kept[""]
    assert all(more > 1.5 * less for more, less in zip(kept["row"], kept[""], strict=True))
    for way in ways.values():
        for device in way.devices:
            held = set(resident_weights(SPEC, way, device))
            for rows in (1, 2, 64):
                program = device_programs(SPEC, way, TokenBatch((rows,), cache=96))[device]
                assert held.issuperset(program.weights()), (way.layouts, rows)
