"""The next token: probabilities as transformers changes them, draws that depend on seed and place alone, and ends."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hepti_mqtt.models.generation import LIKELIEST, NO_TAIL, Candidates, Sampling

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "sampling.json").read_text("utf-8"))
ROW = np.array(GOLDEN["logits"], np.float32)
DRAWS = 4000


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: " ".join(map(str, case["options"])))
def test_probabilities_are_those_of_transformers(case):
    options = dict(case["options"])
    temperature, sampling = options.pop("temperature"), Sampling(**options, prompt=tuple(GOLDEN["prompt"]))
    row = ROW.copy()
    sampling.shift(row, GOLDEN["before"])
    found = np.exp((row.astype(np.float64) - row.max()) / temperature)
    order = np.argsort(-found, kind="stable")
    found[order[sampling.keep(np.log(found[order]), NO_TAIL).first :]] = 0
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
    ended = [rules.ends(tokens) for tokens in ([], [1], [1, 3], [1, 3, 1], [1, 1, 1, 1])]
    assert ended == [False, False, True, False, True]


def row_of(logits, temperature, count):
    """Return what devices say of a row."""
    best = np.argsort(-logits, kind="stable")[:count]
    lower = logits.astype(np.float64) - logits.max()
    sums = [float(np.float32(np.exp(lower / t).sum())) for t in (1.0, temperature or 1.0)]
    return Candidates(best, logits[best], len(logits), (sums[0], sums[1]), temperature or 1.0)


SAMPLINGS = {
    "as they are": (Sampling(), 0.8),
    "top_k": (Sampling(top_k=40), 1.0),
    "top_p": (Sampling(top_p=0.9), 1.0),
    "a large top_p": (Sampling(top_p=0.98, min_p=1e-6), 1.3),
    "top_p of lowered": (Sampling(top_p=0.95, presence=0.5, prompt=tuple(range(0, 900, 9))), 1.0),
    "top_p of top_k": (Sampling(top_k=50, top_p=0.8), 1.0),
    "min_p": (Sampling(min_p=0.05), 1.0),
    "all three": (Sampling(top_k=60, top_p=0.95, min_p=0.01), 1.0),
    "repetition": (Sampling(repetition=1.3, prompt=tuple(range(0, 900, 9)), top_k=20), 0.9),
    "less repetition": (Sampling(repetition=0.7, prompt=tuple(range(0, 900, 90))), 0.0),
    "penalties": (Sampling(presence=0.6, frequency=0.3, top_p=0.9), 0.9),
    "lowered": (Sampling(repetition=1.1, frequency=0.3, prompt=tuple(range(0, 900, 9))), 0.7),
    "rewards": (Sampling(presence=-0.6, frequency=-0.3), 0.0),
    "bias": (Sampling(bias=((3, 2.0), (5, -100.0), (7, 4.0))), 0.8),
    "a large bias": (Sampling(bias=((3, 100.0),)), 0.8),
}


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize(("count", "spread"), [(64, 2.0), (64, 4.0), (1000, 4.0)])
def test_candidates_give_the_token_of_all_logits_or_none(name, count, spread, monkeypatch):
    monkeypatch.setattr("hepti_mqtt.models.generation.CANDIDATES", count)
    sampling, hot = SAMPLINGS[name]
    rng, given = np.random.default_rng(5), 0
    texts = 120
    for place in range(texts):
        logits = (spread * rng.standard_normal(1000)).astype(np.float32)
        if place % 4 == 0:
            logits = np.round(logits)  # many are equal
        before = rng.integers(0, 1000, place % 30).tolist()
        rules = replace(LIKELIEST, sampling=sampling, seed=place, never=(1, 2), first_never=(int(logits.argmax()),))
        temperature = 0.0 if place % 5 == 0 else hot
        row = row_of(logits, temperature, count)
        picked = rules.pick(row, before, temperature)
        if picked is not None:
            wide = replace(rules, likely=3)
            by_all = wide.likely_with(logits, int(row.ids[picked]))
            assert [one.token for one in row.likely(picked, 3)] == [one.token for one in by_all]
            assert np.allclose([one.logprob for one in row.likely(picked, 3)], [one.logprob for one in by_all])
            assert int(row.ids[picked]) == rules.choose(logits[None], before, temperature)[0]
            given += 1
    assert given == texts or count < 1000, "all tokens are candidates"
    assert given > 0.8 * texts or name != "lowered" or spread < 4, given
    rare = ("less repetition", "a large bias", "rewards", "a large top_p", "top_p of lowered")
    usual = name not in rare and spread > 2
    assert given > 0.5 * texts or not usual, given
