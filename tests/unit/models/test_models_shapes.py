"""Request shapes belong to the families: plain forms are their inverses, and a new family brings its own."""

import numpy as np
import pytest
import readings
from hypothesis import given
from hypothesis import strategies as st
from readings import ReadingsSpec, Series
from sites import EVERY_FAMILY, TOLERANCE, everyone, tensors
from swarm import Swarm, plan_of

from hepti_mqtt import models
from hepti_mqtt.core.errors import PlanError
from hepti_mqtt.core.spec import PlainShape
from hepti_mqtt.models import families
from hepti_mqtt.models.shapes import CHUNK_ROWS, OVERLAP_ROWS, ImageBatch, TokenBatch, next_rows
from hepti_mqtt.planner import decide
from hepti_mqtt.runtime.coordinator.batches import Batch, split_into_micro_batches
from hepti_mqtt.runtime.coordinator.fair_queue import Batching
from hepti_mqtt.runtime.worker.residents import shape_of
from hepti_mqtt.service.requests import ModelInput, split_into_batches


@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_a_shape_comes_back_from_its_plain_form(name):
    spec = EVERY_FAMILY[name]
    for shape in (
        models.largest_shape(spec),
        models.representative_shape(spec, 3, 2),
        models.representative_shape(spec, 3).with_want("hidden"),
    ):
        again = spec.input_spec.shape_of(shape.plain())
        assert (again, hash(again), type(again)) == (shape, hash(shape), type(shape))
        assert shape.size == sum(shape.sizes) == shape.plain().size


def test_items_that_are_joined_can_be_taken_apart():
    tokens = TokenBatch((3, 5), mask_rows=(1, 4)).concatenate([TokenBatch((2,), mask_rows=(0,))])
    assert tokens == TokenBatch((3, 5, 2), mask_rows=(1, 4, 8))
    assert tokens.mask_positions == ((0, 1), (1, 1), (2, 0))
    part, where = tokens.slice_items(1, 3)
    assert part == TokenBatch((5, 2), mask_rows=(1, 5))
    assert np.arange(10)[where].tolist() == [3, 4, 5, 6, 7, 8, 9]
    images = ImageBatch(2, 5).concatenate([ImageBatch(1, 5)])
    assert images.slice_items(1, 3) == (ImageBatch(2, 5), slice(1, 3))


def test_a_session_is_not_divided_and_images_have_none():
    prompt = TokenBatch((3,), cache=64)
    assert prompt.slice_items(0, 1) == (prompt, slice(None))
    assert prompt.decode_step(1) == TokenBatch((1,), cache=64)
    with pytest.raises(ValueError):
        prompt.slice_items(0, 0)
    with pytest.raises(ValueError):
        ImageBatch(1).decode_step(1)


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("vit-classifier", PlainShape((3,))),
        ("tiny-convnet", PlainShape((1,), mask_rows=(0,))),
        ("bert-embedding", PlainShape((3,), session_rows=8)),
        ("vit-classifier", PlainShape((2**20,))),
        ("tiny-gpt2", PlainShape((1,), session_rows=2**20)),
    ],
)
def test_a_forged_shape_of_another_family_is_refused(name, plain):
    with pytest.raises(PlanError):
        shape_of(EVERY_FAMILY[name], plain)


SPEC = ReadingsSpec(layers=2)
ASKED = (Series(((9, 4),)), Series(((3, 2), (5, 0))), Series(((6, 1),), "hidden"))


@pytest.fixture(autouse=True)
def _one_more_family(monkeypatch):
    monkeypatch.setitem(families.FAMILIES, readings.FAMILY, readings)


def inputs(shape, seed=0):
    return models.random_inputs(SPEC, shape, np.random.default_rng(seed))


DECIDERS = {"searched": decide, "row": everyone(("row", {"variant": "kv"})), "column": everyone(("column", {}))}


@pytest.mark.parametrize("decider", DECIDERS)
def test_it_is_planned_divided_and_answered(decider):
    held = tensors(SPEC)
    hosts = dict.fromkeys(("d0", "d1"), (1e9, 1 << 30))
    swarm = Swarm(SPEC, held, hosts, decider=DECIDERS[decider], batching=Batching())
    swarm.run(30, until=lambda: plan_of(swarm) is not None)
    assert plan_of(swarm) is not None, [note.text for note in swarm.notes]
    assert len(plan_of(swarm).devices) == (1 if decider == "searched" else 2)
    asked = [(i, shape) for i in range(4) for shape in ASKED]
    for i, shape in asked:
        swarm.submit((i, shape), shape, inputs(shape, i))
    swarm.run(60, until=lambda: len(swarm.answers) + len(swarm.errors) == len(asked))
    assert not swarm.errors
    for i, shape in asked:
        ((got, _),) = swarm.answers[i, shape]
        expected = models.reference(SPEC, held, inputs(shape, i), shape)[1]
        assert got.shape == SPEC.output_shape(shape)
        np.testing.assert_allclose(got, expected, atol=TOLERANCE)
    runs = [stats for ((_, told),) in swarm.answers.values() for stats in told]
    assert max(stats.requests for stats in runs) > 1, "none was joined with another"
    assert {type(stats.shape) for stats in runs} == {Series}


def test_what_is_too_large_for_one_run_is_cut():
    shape = Series(((9, 8), (7, 0), (8, 3)))
    readings_of_all = inputs(shape)
    whole = ModelInput(shape, readings_of_all, is_list=True, top_k=1)
    for chunks in (
        split_into_batches(whole, models.largest_shape(SPEC).size),
        split_into_micro_batches(split_into_batches(whole, 9)),
    ):
        assert len(chunks) > 1
        assert chunks[0].shape.concatenate([chunk.shape for chunk in chunks[1:]]) == shape
        np.testing.assert_array_equal(np.concatenate([chunk.inputs for chunk in chunks]), readings_of_all)
    parts = split_into_micro_batches([Batch(Series(((64, 1), (70, 2))), np.zeros(134, np.int32))])
    assert [part.shape for part in parts] == [Series(((64, 1),)), Series(((70, 2),))]


@pytest.mark.parametrize(
    "forged", [PlainShape((3,)), PlainShape((3, 3), mask_rows=(1, 2)), PlainShape((21,), mask_rows=(0,))]
)
def test_a_shape_that_none_of_its_requests_has_is_refused(forged):
    with pytest.raises(PlanError):
        shape_of(SPEC, forged)


@given(total=st.integers(1, 2000), cached=st.integers(0, 1999))
def test_runs_of_few_sizes_cache_all_rows(total, cached):
    cached %= total
    while cached < total:
        first, stop = next_rows(cached, total)
        assert 0 <= first <= cached < stop <= total, "no row is left out"
        assert (stop - first).bit_count() == 1
        assert stop - first <= CHUNK_ROWS
        assert cached - first <= (OVERLAP_ROWS if stop == total else 0), "only the last run computes rows again"
        cached = stop
