"""A text is the same with guesses as without, and takes fewer runs where it repeats itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sites import always, plan, tensors
from swarm import Swarm

from hepti_mqtt import models
from hepti_mqtt.checkpoint.make import spec_of_kind
from hepti_mqtt.models.generation import LIKELIEST, Sampling, TokenRules
from hepti_mqtt.models.transformer import ModelSpec
from hepti_mqtt.runtime.coordinator.guesses import SIZES, Guesses, StepPace
from hepti_mqtt.runtime.coordinator.requests import Batch, Generation
from hepti_mqtt.spec import Want

SPEC = spec_of_kind("tiny-llama")
BEGINNING = (5, 9, 2, 7, 5, 9, 2, 7, 5, 9, 2)
MOST = 40


def written(
    rules: TokenRules = LIKELIEST,
    guesses: Guesses | None = None,
    lost_after: int = -1,
    want: Want = "task",
    spec: ModelSpec = SPEC,
) -> tuple[list[int], int]:
    """Return the tokens of a text by two devices, and how many runs they took."""
    devices = {"d0": (1e9, 1 << 30), "d1": (1e9, 1 << 30)}
    swarm = Swarm(spec, tensors(spec), devices, decider=always(plan(spec, ("decoder", {}), (1.0, 1.0))), jitter_s=0.01)
    shape, inputs = models.single_sequence(spec, np.array(BEGINNING, np.int32), "task", len(BEGINNING) + MOST)
    generation = Generation(BEGINNING, MOST, shape.with_want(want), rules, guesses=guesses, vocab=spec.head.outputs)
    swarm.begin("r", Batch(shape, inputs), generation)
    if lost_after >= 0:
        swarm.run(120, until=lambda: len(swarm.tokens.get("r", ())) > lost_after)
        swarm.kill("d1")
        swarm.join("d1", 1e9, 1 << 30)
    swarm.run(120, until=lambda: "r" in swarm.answers or "r" in swarm.errors)
    assert not swarm.errors
    (answer, stats), *_ = swarm.answers["r"]
    assert [index for index, _ in swarm.tokens["r"]] == list(range(len(answer))), "each token once, in order"
    assert [token for _, token in swarm.tokens["r"]] == answer.tolist()
    return answer.tolist(), len(stats)


RULES = {
    "likeliest": LIKELIEST,
    "drawn": TokenRules(temperatures=(0.9,), seed=7, sampling=Sampling(top_k=2)),
    "ends": TokenRules(stops=lambda tokens: len(tokens) >= 21),
}


@pytest.mark.parametrize("name", RULES)
def test_a_text_is_the_same_with_guesses(name):
    plain, runs = written(RULES[name])
    guessed, fewer = written(RULES[name], Guesses())
    assert guessed == plain
    assert fewer <= runs
    assert name == "drawn" or fewer < 0.6 * runs, (fewer, runs)
    text, by_candidates = written(RULES[name], Guesses(), want="candidates")
    assert text == plain
    assert by_candidates < fewer + 5, "runs depend on how long others took"


@pytest.mark.parametrize("guesses", [None, Guesses])
@pytest.mark.parametrize("most", [0, 9])
def test_what_candidates_leave_open_is_chosen_by_all_logits(guesses, most, monkeypatch):
    for room in ("transformer", "generation"):
        monkeypatch.setattr(f"hepti_mqtt.models.{room}.CANDIDATES", 4)
    spec = replace(SPEC, max_tokens=SPEC.max_tokens - 1)  # whose graphs nobody else keeps
    rules = TokenRules(temperatures=(0.9,), seed=7, sampling=Sampling(top_k=most))
    plain, runs = written(rules, spec=spec)
    found, more = written(rules, guesses and guesses(), want="candidates", spec=spec)
    assert found == plain
    assert guesses or more > runs, "some rows were asked for once more"
    assert written(rules, guesses and guesses(), 9, "candidates", spec)[0] == plain


@pytest.mark.parametrize("after", [0, 9, 30])
def test_a_lost_device_changes_no_token_of_a_text_with_guesses(after):
    assert written(guesses=Guesses(), lost_after=after)[0] == written()[0]


def test_what_followed_before_is_guessed_and_goes_on_repeating():
    guesses, pace = Guesses(), StepPace()
    assert guesses.propose((1, 2, 3, 4), (9,), 7, pace) == ()
    for _ in range(20):
        guesses.record(7, 7)
    assert guesses.propose((1, 2, 3, 4), (9, 1, 2), 7, pace) == (3, 4, 9, 1, 2, 3, 4)
    assert guesses.propose((1, 2, 3, 4), (9, 1, 2), 2, pace) == (3,), "as many as are of use, in a run of few sizes"
    assert guesses.propose((1, 2, 3, 4), (9,), 7, pace) == (), "tokens that were taken back"
    assert guesses.propose((8, 8), (8,), 7, pace) == (8,) * 7


def test_guesses_that_are_wrong_or_runs_that_are_slow_end_guessing():
    text, pace = ((1, 2, 3), (1, 2)), StepPace()
    wrong = Guesses()
    for _ in range(30):
        wrong.record(1, 0)
    assert wrong.propose(*text, 7, pace), "a row more costs nothing as far as is known"
    for _ in range(4):
        pace.record(1, 1.0)
        for rows in SIZES:
            pace.record(rows, rows * 1.0)
    assert wrong.propose(*text, 7, pace) == ()
    assert Guesses().propose(*text, 7, pace) == ()
