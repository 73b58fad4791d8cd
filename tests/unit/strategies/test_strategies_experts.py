"""Mixtures of experts divided over devices, in f32 and in blocks: what plain NumPy computes, whatever their shares."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf_writer import converted
from sites import TOLERANCE, plan, request
from together import run_programs

from hepti_mqtt import models
from hepti_mqtt.checkpoint import Checkpoint, make_model, spec_of_kind
from hepti_mqtt.core.program import Compute
from hepti_mqtt.kernels.registry import works
from hepti_mqtt.models.shapes import TokenBatch
from hepti_mqtt.strategies.plan_programs import device_programs, resident_weights

MIXTURES = [f"tiny-{name}" for name in ("qwen3-moe", "qwen3-moe-mixed", "mixtral", "olmoe", "granite-moe", "gpt-oss")]
WEIGHTS = [(1.0,), (1.0, 2.0), (2.0, 1.0, 0.0, 3.0)]


@pytest.mark.parametrize("storage", ["q4_0", "q8_0", "mxfp4"])
@pytest.mark.parametrize(
    ("kind", "architecture", "more"),
    [
        ("tiny-qwen3-moe", "qwen3moe", {"expert_feed_forward_length": 64}),
        ("tiny-olmoe", "olmoe", {}),
        (
            "tiny-gpt-oss",
            "gpt-oss",
            {"expert_feed_forward_length": 64, "attention.sliding_window": 8, "attention.key_length": 16},
        ),
    ],
)
def test_experts_in_blocks_are_divided_between_blocks(
    tmp_path: Path, storage: str, kind: str, architecture: str, more: dict[str, int]
) -> None:
    original = make_model(kind, tmp_path / "original")
    keys = {f"{architecture}.{k}": n for k, n in {"expert_count": 6, "expert_used_count": 2, **more}.items()}
    path = converted(original, tmp_path / "m.gguf", storage, storage, architecture, **keys)
    with Checkpoint.open(path) as model:
        check_divided(model, model.widened.get(storage, storage))


@pytest.mark.parametrize("how", ["q4", "q8"])
@pytest.mark.parametrize("kind", [kind for kind in MIXTURES if kind != "tiny-mixtral"])  # its experts fill no block
def test_experts_that_are_quantised_on_opening_are_divided_between_blocks(tmp_path: Path, how: str, kind: str) -> None:
    with Checkpoint.open(make_model(kind, tmp_path / "m"), weights=how) as model:
        check_divided(model, f"{how}_0")


def check_divided(model: Checkpoint, storage: str) -> None:
    spec, held, values = model.spec, model.weights(), model.tensors()
    shape, inputs = request(spec, (9,))
    want = models.reference(spec, values, inputs, shape)[1]
    for weights in WEIGHTS:
        divided = plan(spec, ("decoder", {}), weights)
        got = run_programs(device_programs(spec, divided, shape), held, inputs)
        np.testing.assert_allclose(got, want, atol=TOLERANCE)
        refs = [ref for device in divided.devices for ref in resident_weights(spec, divided, device)]
        own = [ref for ref in refs if ".experts." in ref.tensor and ref.layout == "packed"]
        assert {ref.weight_dtype for ref in own} == {storage}


def test_a_price_counts_chosen_experts_and_memory_all() -> None:
    spec = spec_of_kind("tiny-qwen3-moe")
    alone = plan(spec, ("single", {}), (1.0,))
    program = device_programs(spec, alone, TokenBatch((1,), cache=32))["d0"]
    ups = [op for op in program.ops if isinstance(op, Compute) and op.kernel == "experts_up"]
    (work,) = works(ups[0], program.slots)
    assert work.flops == 2.0 * 2 * 32 * 2 * 64, "gate and up of two of six experts"
    assert work.n == 2 * 2 * 64
    own = [ref for ref in resident_weights(spec, alone, "d0") if ".experts." in ref.tensor]
    assert len(own) == spec.layers * 6 * 3
