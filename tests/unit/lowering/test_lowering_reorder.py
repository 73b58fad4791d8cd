"""The other order of the products around attention: the same tensors and weights, where it takes less."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sites import EVERY_FAMILY, FAMILIES, plan, request

from hepti_mqtt.core.plan import apportion
from hepti_mqtt.core.program import Compute
from hepti_mqtt.kernels import KERNELS
from hepti_mqtt.lowering import roles
from hepti_mqtt.lowering.attention import ReorderedAttention
from hepti_mqtt.lowering.graph import GraphBuilder
from hepti_mqtt.lowering.regions import index_count, span
from hepti_mqtt.lowering.rewrites import REORDERED_COST, choose_product_order, multiplications, reorder_attention
from hepti_mqtt.models import graph
from hepti_mqtt.models.transformer import ModelSpec
from hepti_mqtt.strategies.plan_programs import device_programs, lower_plan, resident_weights

# Families that change scores after the product of queries and keys.
OTHERS = tuple(f for f, s in FAMILIES.items() if isinstance(s, ModelSpec) and (s.block.thetas or s.block.buckets))
KERNELS_OF_KEYS = ("linear", "attention", "attention_reordered")


def over_x(net):
    return [op for op in net.ops if isinstance(op, ReorderedAttention)]


@pytest.mark.parametrize("family", ["tiny-gpt2", "tiny-convnet", *OTHERS])
def test_a_model_without_such_products_stays_as_it_is(family):
    net = graph(EVERY_FAMILY[family], request(EVERY_FAMILY[family], (5,))[0])
    assert reorder_attention(net).ops == net.ops
    assert not over_x(reorder_attention(net))


def block(**changes):
    """Return a graph of one attention, with changes that exclude the other order."""
    net = GraphBuilder()
    x = net.linear("x", net.input("given", (8, 4), "f32"), roles.STEM, {"w": 12}, bias=False)
    qkv = net.linear("qkv", x, roles.QKV, {"q": 8, "k": 8, "v": 8}, activation=changes.get("activation"))
    net.attention(
        "attention", qkv, changes.get("kv", qkv), roles.ATTENTION, heads=2, width=8, columns=(0, 8, 16), lengths=(8,),
        causal=changes.get("causal", False),
    )  # fmt: skip
    if changes.get("read"):
        net.sum("both", "attention", net.columns("keys", qkv, roles.TASK, 8, 16), roles.TASK)
    return net.build()


@pytest.mark.parametrize("changes", [{"causal": True}, {"read": True}, {"activation": "gelu"}], ids=str)
def test_what_needs_keys_and_values_keeps_them(changes):
    assert over_x(reorder_attention(block()))
    assert not over_x(reorder_attention(block(**changes)))


@settings(deadline=None, max_examples=40)
@given(
    tokens=st.lists(st.integers(1, 90), min_size=1, max_size=3),
    heads=st.sampled_from([1, 2, 3, 4, 12]),
    d=st.sampled_from([1, 4, 16]),
    weights=st.lists(st.floats(0.05, 5.0), min_size=1, max_size=8),
)
def test_the_order_is_that_of_fewer_multiplications_on_the_busiest_device(tokens, heads, d, weights):
    """Counted from the kernels' own work in both Programs; the other order counts as so much dearer as it is."""
    spec = replace(
        FAMILIES["bert-embedding"], layers=1, hidden=heads * d, heads=heads, max_tokens=300,
        text=replace(FAMILIES["bert-embedding"].text, positions=300),
    )  # fmt: skip
    shape, _ = request(spec, tokens, "hidden")
    counted = []
    for order in ("kept", "reordered"):
        fixed = plan(spec, ("voltage", {"shares": "uneven", "order": order}), weights)
        counted.append([around_attention(p) for p in device_programs(spec, fixed, shape).values()])
    fixed = plan(spec, ("voltage", {"shares": "uneven"}), weights)
    rows = [span(*r) for r in apportion(shape.tokens, fixed.shares["rows"])]
    (pair,) = pairs(graph(spec, shape))
    # Those of queries are in both.
    products = [
        [c - index_count(r) * spec.hidden**2 for c, r in zip(weights_by_order, rows, strict=True)]
        for weights_by_order in counted
    ]
    assert products == [[multiplications(*pair, r)[i] for r in rows] for i in (0, 1)]
    usual, other = map(max, products)
    assert is_reordered(spec, fixed, shape) == (REORDERED_COST * other < usual)
    if len([r for r in rows if r]) == 1:
        assert not is_reordered(spec, fixed, shape) or heads == 1


def around_attention(program):
    """Return the multiplications of a device for queries, keys, values and attention of the only layer."""
    mine = (op for op in program.ops if isinstance(op, Compute) and op.kernel in KERNELS_OF_KEYS)
    mine = (op for op in mine if program.node(op.node) in ("0.qkv", "0.attention"))
    return sum(KERNELS[op.kernel].work(op, program.slots).flops for op in mine) / 2


def pairs(net):
    by_name = net.by_name
    return [(by_name[op.inputs[0]], op) for op in net.ops if op.role == roles.ATTENTION]


def is_reordered(spec, fixed, shape):
    return bool(over_x(lower_plan(spec, fixed, shape).full_graph))


def test_one_plan_has_both_orders_by_length_and_the_same_weights():
    spec = replace(
        FAMILIES["bert-embedding"], max_tokens=200, text=replace(FAMILIES["bert-embedding"].text, positions=200)
    )
    weights_by_order = {}
    for order in ({}, {"order": "kept"}, {"order": "reordered"}):
        fixed = plan(spec, ("voltage", {"shares": "equal", **order}), (1.0,) * 3)
        weights_by_order[tuple(order.values())] = {d: set(resident_weights(spec, fixed, d)) for d in fixed.devices}
        if not order:
            assert [is_reordered(spec, fixed, request(spec, (m,))[0]) for m in (3, 9, 60, 200)] == [
                True,
                True,
                False,
                False,
            ]
    assert weights_by_order[()] == weights_by_order[("kept",)] == weights_by_order[("reordered",)]


def test_narrow_weights_stay_in_their_order_whatever_is_asked_for():
    spec = FAMILIES["bert-embedding"]
    fixed = plan(spec, ("voltage", {"shares": "equal"}), (1.0,) * 4)
    shape, _ = request(spec, (8,))
    assert is_reordered(spec, fixed, shape)
    assert not is_reordered(spec, replace(fixed, weight_dtype="f16"), shape)
    for storage in ("f16", "w8a8", "w8a32"):
        assert choose_product_order(graph(spec, shape), "reordered", [span(0, 8)], storage) is not reorder_attention
