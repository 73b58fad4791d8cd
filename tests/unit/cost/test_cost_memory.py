"""The memory of a device besides weights and slots."""

from __future__ import annotations

import pytest
from sites import plan

from hepti_mqtt.checkpoint.make import spec_of_kind
from hepti_mqtt.cost.memory import resident_bytes, scratch_bytes, weights_bytes
from hepti_mqtt.models import graph, largest_shape, with_cache, with_storages
from hepti_mqtt.models.shapes import TokenBatch
from hepti_mqtt.models.tensors import EMBEDDING_TABLE, LOGITS_MATRIX
from hepti_mqtt.strategies import STRATEGIES
from hepti_mqtt.strategies.plan_programs import device_program, resident_counts, resident_weights

SPEC = spec_of_kind("tiny-llama")
ROWS, LONGEST = 16, 96
SHAPE = TokenBatch((ROWS,), cache=LONGEST)


@pytest.mark.parametrize(
    ("spec", "nbytes"),
    [
        (SPEC, 0),
        (with_cache(SPEC, "f16"), 4 * LONGEST * 2 * SPEC.head_dim),  # of one head, in f32
        (
            with_storages(SPEC, {EMBEDDING_TABLE: "q8_0", LOGITS_MATRIX: "q8_0"}),
            2 * 4 * SPEC.hidden,
        ),  # the last row, for the head alone
    ],
    ids=["f32", "cache in f16", "words in blocks"],
)
def test_an_op_takes_scratch_memory_once(spec, nbytes) -> None:
    program = device_program(spec, plan(spec, ("single", {}), (1.0,)), SHAPE, "d0")
    assert scratch_bytes(program) == nbytes


@pytest.mark.parametrize(
    "kind", ["tiny-bert", "tiny-mpnet", "tiny-albert", "tiny-gemma3-text", "tiny-qwen3-moe", "tiny-vit"]
)
def test_a_range_counts_once_for_each_layer_that_has_its_like(kind) -> None:
    spec = spec_of_kind(kind, 12)
    whole = graph(spec, largest_shape(spec))
    for method in STRATEGIES.values():
        if method.groups is not None or method.why_unsupported(whole) is not None:
            continue
        way = plan(spec, (method.name, dict(method.options[0])), (5.0, 3.0)[: method.max_devices])
        for device in way.devices:
            refs = resident_weights(spec, way, device)
            assert resident_bytes(spec, way, device) == weights_bytes(refs), method.name
            assert sum(resident_counts(spec, way, device).values()) == len(refs), method.name
