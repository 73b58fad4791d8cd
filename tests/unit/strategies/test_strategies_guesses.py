"""A text is the same with guesses as without, and takes fewer runs where it repeats itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from generated import begin, finish, site
from questions import question
from sites import plan

from hepti_mqtt import models
from hepti_mqtt.checkpoint.make import spec_of_kind
from hepti_mqtt.core.profiles import Cluster, Curve, DeviceProfile, Link, rows_factor
from hepti_mqtt.core.storage import Product
from hepti_mqtt.models.generation import LIKELIEST, Sampling, TokenRules
from hepti_mqtt.planner import run_seconds, simulate_plan
from hepti_mqtt.runtime.coordinator.guesses import SIZES, Guesses, StepPace

SPEC = spec_of_kind("tiny-llama")
BEGINNING = (5, 9, 2, 7, 5, 9, 2, 7, 5, 9, 2)
MOST = 40


def written(rules=LIKELIEST, guesses=None, lost_after=-1, want="task", spec=SPEC) -> tuple[list[int], int]:
    """Return the tokens of a text by two devices, and how many runs they took."""
    swarm = site(spec, "decoder", (1.0, 1.0))
    begin(swarm, "r", BEGINNING, MOST, rules=rules, want=want, guesses=guesses)
    if lost_after >= 0:
        swarm.run(120, until=lambda: len(swarm.tokens.get("r", ())) > lost_after)
        swarm.kill("d1")
        swarm.join("d1", 1e9, 1 << 30)
    finish(swarm, "r")
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
    spec = replace(SPEC, max_tokens=SPEC.max_tokens - 1)  # no other test caches its graphs
    rules = TokenRules(temperatures=(0.9,), seed=7, sampling=Sampling(top_k=most))
    plain, runs = written(rules, spec=spec)
    tokens, more = written(rules, guesses and guesses(), want="candidates", spec=spec)
    assert tokens == plain
    assert guesses or more > runs, "some rows were requested once more"
    assert written(rules, guesses and guesses(), 9, "candidates", spec)[0] == plain


@pytest.mark.parametrize("after", [0, 9])
def test_a_lost_device_changes_no_token_of_a_text_with_guesses(after):
    assert written(guesses=Guesses(), lost_after=after)[0] == written()[0]


def foreseen(guesses, *, right, tokens=40):
    """Let tokens follow, as guessed or not, in runs without guesses; earlier, 3 followed 1 and 2."""
    for i in range(tokens):
        guesses.propose((1, 2, 3, 4), (9, 1, 2), 7, None)
        guesses.record((3,) if i < right * tokens else (5,))


def flat(_rows):
    return 1.0


def test_what_followed_before_is_guessed_and_goes_on_repeating():
    guesses, pace = Guesses(), StepPace(flat)
    assert guesses.propose((1, 2, 3, 4), (9,), 7, pace) == ()
    foreseen(guesses, right=1.0)
    assert guesses.propose((1, 2, 3, 4), (9, 1, 2), 7, pace) == (3, 4, 9, 1, 2, 3, 4)
    assert guesses.propose((1, 2, 3, 4), (9, 1, 2), 2, pace) == (3,), "as many as are of use, in a run of few sizes"
    assert guesses.propose((1, 2, 3, 4), (9,), 7, pace) == (), "withdrawn tokens"
    assert guesses.propose((8, 8), (8,), 7, pace) == (8,) * 7


# Seconds of a product by its rows: of a small board with slow memory for its cores; as in DECODE of a server with fast
# memory; and of a device that computes each row apart.
BOARD, SERVER, APART = ((1, 1.0), (8, 1.3)), ((1, 1.0), (4, 2.8), (8, 4.5)), ((1, 1.0), (8, 8.0))


@pytest.mark.parametrize(
    ("points", "right", "rows"),
    [
        (BOARD, 0.5, 4), (BOARD, 0.95, 8), (BOARD, 0.0, 1),
        (SERVER, 0.5, 1), (SERVER, 0.75, 2), (SERVER, 1.0, 8),
        (APART, 1.0, 1),
    ],
)  # fmt: skip
def test_as_many_are_guessed_as_the_price_of_their_rows_is_worth(points, right, rows):
    device = DeviceProfile("d", (Curve(64, 64, points, Product("q4_0")), Curve(64, 64, ((1, 1.0),))), 1e9, 1e9)
    cluster = Cluster({"d": device}, {"d": Link()})
    pace = StepPace(lambda count: rows_factor(cluster, ("d",), Product("q4_0"), count))
    guesses = Guesses()
    foreseen(guesses, right=right)
    guessed = guesses.propose((1, 2, 3, 4), (9, 1, 2), 7, pace)
    assert len(guessed) + 1 == rows
    for _ in range(4):  # what runs take counts more than what products were expected to
        for size in (1, *SIZES):
            pace.record(size, float(size))
    assert guesses.propose((1, 2, 3, 4), (9, 1, 2), 7, pace) == ()


def priced(spec, decoder_plan, cluster, shape):
    """Return the simulation of a run."""
    return simulate_plan(question(spec, cluster, shape), decoder_plan)


@pytest.mark.parametrize("kind", ["tiny-llama", "tiny-qwen3"])
@pytest.mark.parametrize("devices", [1, 3])
def test_a_run_of_several_rows_is_priced_as_it_is_simulated(kind, devices):
    spec, names = spec_of_kind(kind), tuple(f"d{i}" for i in range(devices))
    points = ((1, 200e-6), (8, 300e-6), (128, 3e-3))
    profiles = {name: DeviceProfile(name, (Curve(64, 64, points),), 1e9, 1e10) for name in names}
    cluster = Cluster(profiles, {name: Link() for name in names}, endpoints=frozenset(names))
    decoder_plan = plan(spec, ("decoder", {}), (1.0,) * devices)
    step = models.single_sequence(spec, np.array([1], np.int32), "task", 64)[0]
    one = priced(spec, decoder_plan, cluster, step)
    for rows, shape in ((4, step.concatenate([step] * 3)), (8, step.decode_step(8).answering(8))):
        seconds = run_seconds(spec, one.plan, one.price, cluster, rows)
        assert seconds == pytest.approx(priced(spec, decoder_plan, cluster, shape).price.seconds, rel=0.2)
        assert seconds < 1.6 * one.price.seconds


def test_a_prompt_is_priced_from_a_step_as_it_is_simulated():
    """The overhead of ops does not grow with rows; otherwise prompts are priced too high."""
    spec = spec_of_kind("tiny-llama", layers=24)  # the head computes a row alone
    device = DeviceProfile("d0", (Curve(64, 64, ((1, 20e-6), (8, 30e-6), (128, 300e-6))),), 1e9, 1e10, 1e-4)
    cluster, decoder_plan = Cluster({"d0": device}, {"d0": Link()}), plan(spec, ("single", {}), (1.0,))
    shapes = [models.single_sequence(spec, np.ones(count, np.int32), "task", 64)[0] for count in (1, 64)]
    one, prompt = (priced(spec, decoder_plan, cluster, shape) for shape in shapes)
    assert run_seconds(spec, one.plan, one.price, cluster, 64) == pytest.approx(prompt.price.seconds, rel=0.2)
