"""Models in the blocks of their file under plans: k is divided between blocks, and embeddings are stored once."""

from __future__ import annotations

from dataclasses import replace

from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.program import Compute
from hepti_mqtt.models import tensor_sources, weight_dtypes, with_storages
from hepti_mqtt.strategies.plan_programs import device_programs, make_plan, resident_weights

SPEC = spec_of_kind("smollm2-135m")
STORED = {s.name: "q4_1" for s in tensor_sources(SPEC) if s.layout == "packed"} | {"head.decoder.weight": "q8_0"}


def test_columns_before_blocks_of_256_are_divided_by_these() -> None:
    """Also heads: four of 64 are such a block, and three share keys and values."""
    large = [name for name in STORED if "mlp_down" in name or "attention_out" in name]
    whole = replace(SPEC, mlp=2048, heads=12, block=replace(SPEC.block, kv_heads=4))
    spec = with_storages(whole, STORED | dict.fromkeys(large, "q4_k"))
    plan = make_plan(spec, Plan("m", PlanVersion(1, 1), "decoder", ("a", "b"), "a"), "decoder", {}, (1.0, 0.6))
    for device in ("a", "b"):
        refs = [ref for ref in resident_weights(spec, plan, device) if ref.weight_dtype == "q4_k"]
        assert {ref.tensor for ref in refs} == {*large}
        assert all(end % 256 == 0 for ref in refs for end in ref.rows)


def test_what_kernels_do_not_multiply_by_becomes_f32() -> None:
    """Matrices of one product have one kind, and one stored name stands for equal layers."""
    assert with_storages(SPEC, dict.fromkeys(STORED, "f16")) == SPEC
    mixed = with_storages(SPEC, STORED | {"layers.3.value.weight": "f16", "layers.5.mlp_up.weight": "q8_0"})
    assert mixed.storage_of("layers.3.query.weight") is None
    assert mixed.storage_of("layers.4.query.weight") == "q4_1"
    assert mixed.storage_of("layers.5.mlp_up.weight") == "q8_0"
    assert len(with_storages(SPEC, STORED).storages) == 8


def test_int8_activations_leave_the_weights_as_they_are() -> None:
    spec = with_storages(SPEC, STORED)
    assert set(weight_dtypes(spec)) == {"f32", "w8a8"}
    shape = spec.input_spec.shape(1)
    for dtype, how in (("f32", None), ("w8a8", "i8")):
        plan = Plan("m", PlanVersion(1, 1), "single", ("a",), "a", weight_dtype=dtype)
        (program,) = device_programs(spec, plan, shape).values()
        products = [op for op in program.ops if isinstance(op, Compute) and op.kernel == "linear"]
        assert {op.attrs.get("x") for op in products} == {how}
        assert {ref.weight_dtype for op in products for ref in op.weights} == {"q4_1", "q8_0"}
