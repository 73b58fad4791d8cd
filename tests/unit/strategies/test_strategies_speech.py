"""Speech: a divided encoder and the decoder after it, in a session, give the answer of the whole model."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import word_cases
from generated import finish
from sites import TOLERANCE, always, everyone, plan, tensors
from swarm import Swarm
from together import run_programs

from hepti_mqtt import models
from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.checkpoint.make import spec_of_kind
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.program import Compute
from hepti_mqtt.models.generation import TokenRules, Verdict
from hepti_mqtt.models.speech import SpeechRun, SpeechSpec
from hepti_mqtt.planner.accuracy import weight_error
from hepti_mqtt.runtime.coordinator.batches import Batch
from hepti_mqtt.runtime.coordinator.texts import Generation
from hepti_mqtt.runtime.coordinator.transcriptions import Transcription
from hepti_mqtt.service.word_times import token_times
from hepti_mqtt.shares import DeviceResources
from hepti_mqtt.strategies import STRATEGIES
from hepti_mqtt.strategies.plan_programs import device_programs, make_plan, resident_weights

SPEC = spec_of_kind("tiny-whisper")
READS = SPEC.input_spec
ROWS = 20
PROMPT = (5, 6, 7)
FRAMES = np.rint(np.random.default_rng(0).standard_normal(2 * ROWS * SPEC.bands) * 2**20).astype(np.int32)
MOST = 6
METHODS = [
    (name, options)
    for name, method in STRATEGIES.items()
    if method.why_unsupported(models.graph(SPEC, READS.shape())) is None and name != "replicas"
    for options in method.variants_for(3, models.graph(SPEC, READS.shape()))[:2]
]


def inputs(ids) -> np.ndarray:
    return np.concatenate([[0, *ids], FRAMES]).astype(np.int32)


def logits_after(ids) -> np.ndarray:
    """Return the logits behind a prompt by a whole pass of the reference."""
    return models.reference(SPEC, tensors(SPEC), inputs(ids), READS.run(len(ids), ROWS))[1][-1:]


def whole(rules: TokenRules, prompt=PROMPT, temperature: float = 0.0) -> tuple[list[int], list[np.ndarray]]:
    """Return the tokens, and the logits of each step, by whole passes of the reference."""
    text, logits = list[int](), []
    for _ in range(MOST):
        logits.append(logits_after([*prompt, *text]))
        text.append(rules.choose(logits[-1], text, temperature)[0])
    return text, logits


def site(method, spec=SPEC, held=None, **network) -> Swarm:
    """Return a device for `single`, else three."""
    weights = (1.0,) if method[0] == "single" else (1.0, 2.0, 1.0)
    hosts = {f"d{i}": (1e9, 1 << 30) for i in range(len(weights))}
    network = {"decider": always(plan(spec, method, weights)), "jitter_s": 0.01, **network}
    return Swarm(spec, held or tensors(spec), hosts, **network)


def begin(swarm: Swarm, rules: TokenRules, **sound) -> Generation:
    shape = READS.run(len(PROMPT), ROWS)
    generation = Transcription(PROMPT, MOST, shape, rules, FRAMES, **sound)
    swarm.begin("r", Batch(shape, inputs(PROMPT)), generation)
    return generation


@pytest.mark.parametrize(
    ("name", "options"), METHODS, ids=lambda value: "/".join(value.values()) if isinstance(value, dict) else value
)
def test_every_method_gives_the_states_of_one_device(name, options):
    shape = READS.run(len(PROMPT), ROWS, "hidden")
    fixed = plan(SPEC, (name, options), [1.0, 2.0, 1.0][: 1 if STRATEGIES[name].max_devices == 1 else 3])
    output = run_programs(device_programs(SPEC, fixed, shape), tensors(SPEC), inputs(PROMPT))
    expected, _ = models.reference(SPEC, tensors(SPEC), inputs(PROMPT), shape)
    np.testing.assert_allclose(output, expected, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", ["f16", "w8a32", "w8a8"])
def test_the_encoders_weights_may_be_narrow(dtype):
    alone = replace(plan(SPEC, ("single", {}), (1.0,)), weight_dtype=dtype)
    shape = READS.run(len(PROMPT), ROWS, "hidden")
    output = run_programs(device_programs(SPEC, alone, shape), tensors(SPEC), inputs(PROMPT))
    expected, _ = models.reference(SPEC, tensors(SPEC), inputs(PROMPT), shape)
    error = np.linalg.norm(output - expected) / np.linalg.norm(expected)
    assert 0 < error < 0.05
    assert weight_error(SPEC, tensors(SPEC), dtype) < 0.05


RULES = TokenRules(never=(3, 9), first_never=(1,), scored=True, silent=8)


@pytest.mark.parametrize(
    "method", [("single", {}), ("row", {"variant": "kv"}), ("block", {}), ("voltage", {"shares": "equal"})]
)
def test_a_text_is_that_of_whole_passes(method):
    expected, logits = whole(RULES)
    swarm = site(method, duplicates=0.2)
    generation = begin(swarm, RULES)
    finish(swarm, "r")
    assert swarm.tokens["r"] == list(enumerate(expected))
    for got, want in zip(swarm.logits.values(), logits, strict=True):
        np.testing.assert_allclose(got[-1:], want, atol=TOLERANCE)
    (_, stats), *_ = swarm.answers["r"]
    assert [s.shape.encodes for s in stats] == [True] + [False] * (MOST - 1), "the sound is encoded once"
    assert generation.silence == pytest.approx(RULES.silence(next(iter(swarm.logits.values()))))
    assert len(generation.text.scores) == MOST
    assert max(generation.text.scores) < 0


def unhappy(*worths: float):
    """Return a judge that always asks for another text, and finds them worth these numbers in turn."""
    left = list(worths)
    return lambda *_: Verdict(True, (left.pop(0),))


@pytest.mark.parametrize("division", [("single", {}), ("row", {"variant": "kv"})])
def test_a_text_that_is_not_good_enough_is_drawn_again_in_the_same_session(division):
    hot = (0.0, 0.4, 1.0)
    rules = replace(RULES, temperatures=hot, seed=5, judge=unhappy(1.0, 3.0, 2.0))
    swarm = site(division, duplicates=0.2)
    generation = begin(swarm, rules)
    finish(swarm, "r")
    texts = [whole(rules, temperature=temperature)[0] for temperature in hot]
    assert swarm.tokens["r"] == [pair for text in texts for pair in enumerate(text)]
    (output, stats), *_ = swarm.answers["r"]
    assert output.tolist() == texts[1], "the best of them"
    assert (generation.text.temperature, len(set(map(tuple, texts)))) == (0.4, 3)
    assert [s.shape.encodes for s in stats] == [True] + [False] * (3 * MOST - 1)


@pytest.mark.parametrize("opening", [(), (30, 31)])
def test_a_choice_of_the_model_ends_the_prompt(opening):
    rules = replace(RULES, choices=(11, 12, 13), forced=(14,), opening=opening)
    swarm = site(("single", {}))
    begin(swarm, rules)
    finish(swarm, "r")
    text, _ = whole(rules, [*opening, *PROMPT, rules.choose_prompt(logits_after(PROMPT)), 14])
    assert swarm.tokens["r"] == list(enumerate(text))


@pytest.mark.parametrize(("latency_s", "parts"), [(2.5e-4, 4), (0.05, 1)])
def test_the_logits_are_divided_where_links_allow_it(latency_s, parts):
    spec, devices = spec_of_kind("whisper-tiny"), tuple("abcd")
    resources = [DeviceResources(1e8, latency_s, row_flops_per_s=2e9)] * 4
    template = Plan("m", PlanVersion(1, 1), "row", devices, "b")
    speech_plan = make_plan(spec, template, "row", {"variant": "kv"}, [1.0] * 4, resources)
    words = [stop - start for start, stop in speech_plan.ranges["words"]]
    assert (sum(words), sum(map(bool, words)), bool(words[1])) == (51865, parts, True)
    held = {
        d: any(ref.tensor == "head.decoder.weight" for ref in resident_weights(spec, speech_plan, d)) for d in devices
    }
    assert held == {d: bool(n) for d, n in zip(devices, words, strict=True)}
    step = device_programs(spec, speech_plan, spec.input_spec.shape().decode_step(1))
    assert sum(any(isinstance(op, Compute) for op in program.ops) for program in step.values()) == parts


def test_a_lost_device_costs_no_token_and_the_sound_is_encoded_again():
    swarm = site(("row", {"variant": "kv"}), decider=everyone(("row", {"variant": "kv"})))
    begin(swarm, RULES)
    swarm.run(60, until=lambda: len(swarm.tokens.get("r", ())) > 2)
    swarm.kill("d0")  # which has the session
    finish(swarm, "r")
    assert swarm.tokens["r"] == list(enumerate(whole(RULES)[0]))
    (_, stats), *_ = swarm.answers["r"]
    assert sum(s.shape.encodes for s in stats) > 1


def test_shapes_travel_and_what_no_recording_has_is_refused():
    for tokens, rows, encodes in product((1, 3, READS.positions), (READS.positions, READS.longest), (True, False)):
        shape = SpeechRun(tokens, rows, READS.positions, encodes)
        assert READS.shape_of(shape.plain()) == shape
    after_start = SpeechRun(5, 20, READS.positions, start=2)
    assert (READS.shape_of(after_start.plain()), SPEC.output_shape(after_start)[0]) == (after_start, 2)
    assert READS.shape_of(after_start.decode_step(1).plain()) == SpeechRun(1, 20, READS.positions, False)
    too_short = SpeechRun(1, READS.positions - 1, READS.positions)
    for wrong in (too_short, SpeechRun(1, READS.longest + 1, READS.positions)):
        with pytest.raises(ValueError, match="no sound"):
            READS.shape_of(wrong.plain())


TEXT_ANSWERS = json.loads(word_cases.ANSWERS.read_text())


@pytest.fixture(scope="module")
def word_models(tmp_path_factory) -> dict[str, tuple[SpeechSpec, dict[str, np.ndarray]]]:
    """Return spec and tensors of each kind in `word_cases`."""
    output = {}
    for kind in {case.kind for case in word_cases.CASES}:
        with Checkpoint.open(make_model(kind, tmp_path_factory.mktemp("words") / kind)) as checkpoint:
            output[kind] = checkpoint.spec, dict(checkpoint.tensors())
    return output


def forced(text: tuple[int, ...], vocab: int) -> TokenRules:
    """Return rules under which a text has these tokens."""
    allowed = {len(text[:place]): np.arange(vocab) == token for place, token in enumerate(text)}
    return TokenRules(scored=True, silent=8, allowed=lambda before: allowed[len(before)])


@pytest.mark.parametrize("method", [("single", {}), ("row", {"variant": "kv"}), ("block", {})], ids=lambda m: m[0])
@pytest.mark.parametrize("case", word_cases.CASES, ids=lambda case: case.name)
def test_tokens_have_the_times_of_the_reference(word_models, case, method):
    spec, weights = word_models[case.kind]
    spec = replace(spec, alignment=case.heads or spec.alignment)
    swarm = site(method, spec, weights)
    frames, shape = case.frames.reshape(-1), spec.input_spec.run(len(word_cases.PROMPT), word_cases.ROWS)
    rules = forced(case.text, spec.head.outputs)
    generation = Transcription(word_cases.PROMPT, len(case.text), shape, rules, frames, sound_rows=case.sound_rows)
    first = np.concatenate([[0, *word_cases.PROMPT], frames]).astype(np.int32)
    swarm.begin("r", Batch(shape, first), generation)
    finish(swarm, "r")
    assert tuple(generation.text.tokens) == case.text
    times = [token.end for token in token_times(case.text, generation.beginnings)]
    assert times == pytest.approx(TEXT_ANSWERS[case.name], abs=0.02)


def test_a_retried_text_is_aligned_once_and_a_lost_session_begins_with_the_sound():
    spec = replace(SPEC, alignment=((0, 1), (1, 2)))
    rules = replace(RULES, temperatures=(0.0, 0.7), seed=5, judge=unhappy(3.0, 2.0))
    swarm = site(("single", {}), spec)
    text = begin(swarm, rules, sound_rows=ROWS)
    finish(swarm, "r")
    (output, stats), *_ = swarm.answers["r"]
    assert [s.shape.want for s in stats] == ["task"] * 2 * MOST + ["alignment"]
    beginnings, verdict = text.beginnings, text.verdict
    assert beginnings is not None
    assert len(beginnings) == MOST - 1
    text.rewind(len(text.steps) - 1)
    assert not text.done
    text.session.start(PlanVersion(1, 9), 7)
    batch, _ = text.next_batch(None)
    assert batch.shape.encodes, "the new session has no sound yet"
    assert text.append_tokens(np.zeros((1, spec.head.outputs), np.float32)).taken == ()
    batch, session = text.next_batch(None)
    assert (batch.shape.want, session.final) == ("alignment", True)
    rows = np.zeros((batch.shape.tokens, 1), np.float32)
    start, stop, _ = batch.inputs[-3:]
    rows[start:stop, 0] = beginnings
    text.append_tokens(rows)
    assert text.done
    assert (text.text.tokens, text.verdict) == (output.tolist(), verdict)
    np.testing.assert_array_equal(text.beginnings, beginnings)
