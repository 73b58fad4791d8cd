"""The next token: probabilities as transformers changes them, draws that depend on seed and place alone, and ends."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hepti_mqtt.models.generation import LIKELIEST, Sampling

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "sampling.json").read_text("utf-8"))
ROW = np.array(GOLDEN["logits"], np.float32)
DRAWS = 4000


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: " ".join(map(str, case["options"])))
def test_probabilities_are_those_of_transformers(case):
    options = dict(case["options"])
    temperature, sampling = options.pop("temperature"), Sampling(**options, prompt=tuple(GOLDEN["prompt"]))
    row = ROW.copy()
    sampling.shift(row, GOLDEN["before"])
    scaled = row.astype(np.float64) / temperature
    sampling.narrow(scaled)
    found = np.exp(scaled - scaled.max())
    assert found / found.sum() == pytest.approx(case["probabilities"], abs=2e-6)
    rules = replace(LIKELIEST, sampling=sampling, seed=3)
    drawn = [replace(rules, seed=seed).choose(ROW[None], GOLDEN["before"], temperature)[0] for seed in range(50)]
    assert all(case["probabilities"][token] > 0 for token in drawn)


def test_draws_have_the_probabilities_and_depend_on_seed_and_place():
    probabilities = np.exp(ROW.astype(np.float64) - ROW.max())
    probabilities /= probabilities.sum()
    rules = [replace(LIKELIEST, seed=seed) for seed in range(DRAWS)]
    drawn = [one.choose(ROW[None], [1, 2], 1.0)[0] for one in rules]
    assert drawn[:50] == [one.choose(ROW[None], [5, 6], 1.0)[0] for one in rules[:50]], "the place counts, not the text"
    assert drawn[:50] != [one.choose(ROW[None], [5, 6, 7], 1.0)[0] for one in rules[:50]]
    counts = np.bincount(drawn, minlength=len(ROW)) / DRAWS
    assert np.abs(counts - probabilities).max() < 4 * np.sqrt(0.25 / DRAWS)


def test_penalties_of_the_text_and_biases_change_the_likeliest_token():
    row = np.array([[1.0, 0.9, 0.0]], np.float32)
    for sampling, before, token in [
        (Sampling(presence=0.5), [], 0),
        (Sampling(presence=0.5), [0], 1),
        (Sampling(frequency=0.04), [0, 0], 0),
        (Sampling(frequency=0.04), [0, 0, 0], 1),
        (Sampling(bias=((2, 5.0),)), [], 2),
        (Sampling(bias=((0, -100.0),)), [], 1),
    ]:
        assert replace(LIKELIEST, sampling=sampling).choose(row, before)[0] == token
    assert row.tolist() == [[1.0, np.float32(0.9), 0.0]], "the logits of the run stay as they are"


def test_a_text_ends_at_its_end_token_or_where_it_says():
    rules = replace(LIKELIEST, end=(3,), stops=lambda tokens: len(tokens) == 4)
    assert [rules.ends(tokens) for tokens in ([], [1], [1, 3], [1, 3, 1], [1, 1, 1, 1])] == [
        False,
        False,
        True,
        False,
        True,
    ]
