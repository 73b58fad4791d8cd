"""The memory of a device besides weights and slots."""

from __future__ import annotations

import pytest
from sites import plan

from hepti_mqtt.checkpoint.make import spec_of_kind
from hepti_mqtt.cost.memory import scratch_bytes
from hepti_mqtt.models import with_cache, with_storages
from hepti_mqtt.models.shapes import TokenBatch
from hepti_mqtt.models.tensors import HEAD, WORDS
from hepti_mqtt.plan_programs import device_program

SPEC = spec_of_kind("tiny-llama")
ROWS, LONGEST = 16, 96
SHAPE = TokenBatch((ROWS,), cache=LONGEST)


@pytest.mark.parametrize(
    ("spec", "nbytes"),
    [
        (SPEC, 0),
        (with_cache(SPEC, "f16"), 4 * LONGEST * 2 * SPEC.head_dim),  # of one head, in f32
        (with_storages(SPEC, {WORDS: "q8_0", HEAD: "q8_0"}), 2 * 4 * SPEC.hidden),  # the last row, for the head alone
    ],
    ids=["f32", "cache in f16", "words in blocks"],
)
def test_an_op_takes_scratch_memory_once(spec, nbytes) -> None:
    program = device_program(spec, plan(spec, ("single", {}), (1.0,)), SHAPE, "d0")
    assert scratch_bytes(program) == nbytes
