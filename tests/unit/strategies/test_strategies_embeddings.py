"""A table of words divided over devices gives what the whole one on one device gives, to the last bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from generated import begin, finish, greedy, site
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sites import always, plan, tensors
from together import run_programs

from hepti_mqtt import models
from hepti_mqtt.checkpoint.make import spec_of_kind
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.storage import STORAGES, StoredRows
from hepti_mqtt.models import tensors as names
from hepti_mqtt.models.shapes import TokenBatch
from hepti_mqtt.models.transformer import ModelSpec
from hepti_mqtt.runtime.coordinator.fair_queue import Batching
from hepti_mqtt.runtime.coordinator.guesses import Guesses
from hepti_mqtt.strategies.method import EMBEDDINGS, WORDS
from hepti_mqtt.strategies.plan_programs import device_programs, make_plan, resident_weights, root_begins

KINDS = {kind: spec_of_kind(f"tiny-{kind}") for kind in ("gpt2", "llama", "mistral", "gemma3-text", "qwen3-text")}


def stored(spec: ModelSpec, storage: str) -> tuple[ModelSpec, dict[str, Any]]:
    """Return the spec with words in blocks, and its tensors."""
    given: dict[str, Any] = dict(tensors(spec))
    if storage != "f32":
        stored = models.with_storages(spec, dict.fromkeys((names.EMBEDDING_TABLE, names.LOGITS_MATRIX), storage))
        assert isinstance(stored, ModelSpec)
        spec, how = stored, STORAGES[storage]
        for name, _ in spec.storages:
            rows = given[name] if name == names.EMBEDDING_TABLE else given[name].T
            given[name] = StoredRows(how, how.stored(rows))
    return spec, given


def divided(spec: ModelSpec, whole: Plan, weights: tuple[float, ...]) -> Plan:
    """Return the plan with the table of words divided."""
    return make_plan(spec, whole, whole.strategy, whole.options, weights, divides_embeddings=True)


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    storage=st.sampled_from(["f32", "q8_0", "q4_0"]),
    weights=st.lists(st.sampled_from([0.0, 0.1, 1.0, 3.0]), min_size=2, max_size=4).filter(any).map(tuple),
    lengths=st.sampled_from([(1,), (7,), (1, 1, 1), (3, 1)]),
    layout=st.sampled_from(["", "block", "row"]),
    seed=st.integers(0, 9),
)
@example(kind="gemma3-text", storage="q8_0", weights=(0.1, 3.0, 0.0), lengths=(3, 1), layout="block", seed=0)
def test_states_are_those_of_a_whole_table(
    kind: str, storage: str, weights: tuple[float, ...], lengths: tuple[int, ...], layout: str, seed: int
) -> None:
    spec, given_tensors = stored(KINDS[kind], storage)
    whole = plan(spec, ("decoder", {}), weights)
    shape = TokenBatch(lengths, "hidden", cache=64)
    inputs = models.random_inputs(spec, shape, np.random.default_rng(seed))
    states = []
    for one in (whole, divided(spec, whole, weights)):
        programs = device_programs(spec, replace(one, layouts={layout: 0} if layout else {}), shape)
        states.append(run_programs(programs, given_tensors, inputs, seed))
    np.testing.assert_array_equal(*states)


def test_the_decoder_of_speech_reads_a_divided_table() -> None:
    spec, weights = spec_of_kind("tiny-whisper"), (1.0, 2.0, 1.0)
    shape, whole = models.largest_shape(spec), plan(spec, ("block", {}), weights)
    inputs = models.random_inputs(spec, shape, np.random.default_rng(1))
    programs = (device_programs(spec, one, shape) for one in (whole, divided(spec, whole, weights)))
    answers = [run_programs(of_devices, tensors(spec), inputs) for of_devices in programs]
    np.testing.assert_array_equal(*answers)


@pytest.mark.parametrize("storage", ["f32", "q8_0"])
@pytest.mark.parametrize("kind", ["llama", "mistral"])  # the latter has one table for both ends
def test_each_device_holds_the_rows_of_its_own_words_once(kind: str, storage: str) -> None:
    spec, _ = stored(KINDS[kind], storage)
    weights = (1.0, 2.0, 1.0)
    divided_plan = divided(spec, plan(spec, ("decoder", {}), weights), weights)
    assert divided_plan.ranges[EMBEDDINGS.kind] == divided_plan.ranges[WORDS.kind]
    for device, words in zip(divided_plan.devices, divided_plan.ranges[WORDS.kind], strict=True):
        refs = [
            ref
            for ref in resident_weights(spec, divided_plan, device)
            if ref.tensor in (names.EMBEDDING_TABLE, names.LOGITS_MATRIX)
        ]
        ranges = [ref.columns if ref.layout == "packed" else ref.rows for ref in refs]
        assert ranges == [words] * (1 if spec.head.tied else 2)


SITES = [("tiny-gpt2", (1.0, 0.0, 3.0)), ("tiny-llama", (2.0, 1.0)), ("tiny-mistral", (1.0, 1.0, 1.0))]


@pytest.mark.parametrize(("kind", "weights"), SITES)
def test_texts_of_several_users_with_guesses_are_those_of_one_device(kind: str, weights: tuple[float, ...]) -> None:
    spec = spec_of_kind(kind)
    divided_plan = divided(spec, plan(spec, ("decoder", {}), weights), weights)
    divided_plan = replace(divided_plan, layouts={"block": 2})
    network = {"batching": Batching(), "in_flight": 3, "duplicates": 0.2}
    swarm = site(spec, "decoder", weights, decider=always(divided_plan), **network)
    prompts = [(5, 9, 2, 7, 5, 9, 2, 7, 5, 9, 2), (3,), tuple(range(20, 57))]
    for name, prompt in enumerate(prompts):
        begin(swarm, name, prompt, 12, want="candidates", guesses=Guesses())
    finish(swarm, *range(len(prompts)))
    shape, _ = models.single_sequence(spec, np.array(prompts[-1], np.int32), "candidates", 50)
    assert not root_begins(spec, divided_plan, shape), "each device reads the tokens"
    for name, prompt in enumerate(prompts):
        assert swarm.answers[name][0][0].tolist() == greedy(prompt, 12, spec)[0]
