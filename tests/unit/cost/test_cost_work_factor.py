"""The work factor of every method: a number that changes here changes on purpose, or a table has lost a line."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sites import EVERY_FAMILY, METHODS, plan, request

from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.cost.explain import computed_and_distinct, plan_work_factor, work_factor
from hepti_mqtt.lowering import roles
from hepti_mqtt.lowering.graph import Graph, GraphBuilder
from hepti_mqtt.lowering.layouts import Table, split_along
from hepti_mqtt.lowering.lower import Lowered
from hepti_mqtt.lowering.regions import IndexSet, span
from hepti_mqtt.models import graph
from hepti_mqtt.models.transformer import ModelSpec
from hepti_mqtt.strategies import STRATEGIES
from hepti_mqtt.strategies.method import HEADS
from hepti_mqtt.strategies.plan_programs import lower_plan

DEVICES = 4
TOKENS = (16,)


# What four equal devices compute, over what one of them needs for 16 tokens of a small encoder: FLOPs, then elements of
# the roles that somebody computes again. A change must be meant: the tensors that a table does not place are here.
# Norms and residuals run everywhere; those after the last MLP only on the root device: (7 layers x 4 + 1) / 8.
EVERYWHERE = {"attention_sum": 4.0, "after_attention": 4.0, "mlp_sum": 29 / 8, "after_mlp": 29 / 8}
PINNED = {
    "single": (1.0, {}),
    "row/kv": (1.0, {}),
    "row/heads": (1.0, {}),
    "row/heads/2": (1.0, {}),
    "row/mlp": (1.0, {}),
    "column": (1.0, EVERYWHERE),
    "block": (1.0, {}),
    "grid/1": (1.0, {}),
    "grid/2": (1.0, {}),
    "grid/4": (1.0, {}),
    "megatron/direct": (1.0, EVERYWHERE),
    "megatron/ring": (1.0, EVERYWHERE),
    "two_d/1": (1.0, {}),
    "two_d/2": (1.0, {}),
    "two_d/4": (1.0, {}),
    **dict.fromkeys(("galaxy/direct", "galaxy/ring"), (1.0, {})),
    # K and V of all rows on every device: (1 + 2 * 4) of 3 matrices. Reordered, each of 4 heads meets 32 columns
    # instead of its own 8, and no tensor is computed twice. For 16 tokens that is less.
    **dict.fromkeys(("voltage/equal/kept", "voltage/uneven/kept"), (1.75, {"qkv": 3.0})),
    **dict.fromkeys(
        [f"voltage/{shares}{order}" for shares in ("equal", "uneven") for order in ("", "/reordered")], (1.375, {})
    ),
    **dict.fromkeys(("pipeline/throughput", "pipeline/latency"), (1.0, {})),
    # Four layers in two groups: the first group's original layer runs everywhere, the second one's on the head alone.
    "decoupled/everywhere": (
        1.6477,
        dict.fromkeys(("qkv", "attention_sum", "after_attention", "mlp_hidden", "mlp_sum", "after_mlp"), 1.75)
        | {"attention": 1.3},
    ),
    "decoupled/megatron": (
        1.0,
        {"attention_sum": 1.0909, "after_attention": 2.5, "mlp_sum": 1.0205, "after_mlp": 1.75},
    ),
    # One of the two kinds of original layers each: those of all groups but the last, then the last one.
    "decoupled/everywhere/megatron": (
        1.6477,
        {
            **dict.fromkeys(("qkv", "mlp_hidden", "after_mlp"), 1.75),
            **{"attention": 1.3, "attention_sum": 2.0206, "after_attention": 2.5, "mlp_sum": 1.9954},
        },
    ),
    "decoupled/megatron/everywhere": (
        1.0,
        {"attention_sum": 1.0309, "after_attention": 1.75, "mlp_sum": 1.0138, "after_mlp": 1.75},
    ),
    "decoder": (1.0, {"before_attention": 4.0, "after_attention": 4.0, "before_mlp": 4.0, "after_mlp": 29 / 8}),
    # Every device has the request's picture, and makes its first map of it.
    **{f"map_rows/{cut}{halo}": (1.0, {"stem": 4.0}) for cut in ("none", "1", "2") for halo in ("", "/ahead")},
    "modnn": (1.0, {"stem": 4.0}),
    "coedge": (1.0, {"stem": 4.0}),
    "edgeflow": (1.0, {"stem": 4.0}),
    "fused_tiles/none": (2.2586, {"stem": 4.0, "map": 2.4114}),  # 17 x 17 pixels in eight tiles: nearly all halo
    "fused_tiles/1": (1.1126, {"stem": 4.0, "map": 1.1057}),
    "fused_tiles/2": (2.2586, {"stem": 4.0, "map": 2.4114}),  # only the dense layer is after the cut, as without it
    "replicas": (1.0, {}),
    "replicas/2": (1.0, {}),
    "replicas/3": (1.0, {}),
}


def family(name: str) -> str | None:
    """Return the first family that a method divides."""
    for key, spec in EVERY_FAMILY.items():
        if STRATEGIES[name].why_unsupported(graph(spec, request(spec, (1,))[0])) is None:
            return key
    return None


def variants() -> list[tuple[str, dict[str, str]]]:
    variants = []
    for name, method in STRATEGIES.items():
        kind = family(name)
        if kind is None:
            continue
        devices = min(DEVICES, method.max_devices or DEVICES)
        net = graph(EVERY_FAMILY[kind], request(EVERY_FAMILY[kind], (1,))[0])
        # Those of another graph are not all priced, but each is what it is.
        variants += [(name, dict(o)) for o in method.variants_for(devices, net if method.rewrite is None else None)]
    return [*variants, ("row", {"variant": "heads", "groups": "2"})]  # a variant without a price


def named(method: tuple[str, dict[str, str]]) -> str:
    return "/".join([method[0], *method[1].values()])


def of(method, lengths=TOKENS, want="hidden", **changes):
    spec = EVERY_FAMILY[family(method[0])]
    if type(spec) is ModelSpec:
        spec = replace(spec, layers=8, **changes)
    shape, _ = request(spec, lengths, want)
    devices = min(DEVICES, STRATEGIES[method[0]].max_devices or DEVICES)
    return spec, plan(spec, method, (1.0,) * devices), shape


@pytest.mark.parametrize("method", variants(), ids=named)
def test_every_method_does_the_work_that_is_written_down(method):
    total, by_role = PINNED[named(method)]
    work = plan_work_factor(*of(method))
    assert work.total == pytest.approx(total, abs=5e-3)
    assert work.roles == pytest.approx(by_role, abs=5e-3)


# Of encoders that BERT's layers do not stand for: what everyone computes of keys and values, rotated or not, is less
# where heads share them and where windows leave rows out.
VOLTAGE = {"tiny-modernbert": 1.4208, "tiny-gemma3": 1.1998, "tiny-deberta": 1.4898}
# Two heads of keys and values, which four devices with own heads of queries each compute for themselves.
SHARED = {"tiny-gemma3": 1.1199}


@pytest.mark.parametrize("kind", VOLTAGE)
def test_positions_windows_and_gates_are_computed_once_and_shared_heads_where_they_are_needed(kind):
    spec = spec_of_kind(kind)
    shape, _ = request(spec, (24,), "hidden")
    for method in METHODS:
        devices = min(DEVICES, STRATEGIES[method[0]].max_devices or DEVICES)
        work = plan_work_factor(spec, plan(spec, method, (1.0,) * devices), shape)
        own = HEADS in STRATEGIES[method[0]].shares and method[0] != "row"
        want = VOLTAGE[kind] if method[0] == "voltage" else SHARED.get(kind, 1.0) if own else 1.0
        assert work.total == pytest.approx(want, abs=5e-3), named(method)


def test_what_is_written_down_is_registered():
    assert set(PINNED) == {named(method) for method in variants()}


def test_a_forgotten_line_is_seen_by_name():
    spec, chosen, shape = of(("row", {"variant": "kv"}))
    lowered = lower_plan(spec, chosen, shape)
    alone = lower_plan(*of(("single", {})))
    lines = {k: v for k, v in lowered.table.rules.items() if k != roles.QKV}
    forgotten = Lowered(lowered.full_graph, Table(lines, lowered.table.optional_rules), lowered.names)
    work = work_factor(forgotten, alone)
    # Everyone computes K and V of all rows: on four devices that is 1 + 2 * 4 instead of 3 matrices.
    assert work.roles == {"qkv": pytest.approx(3.0, abs=0.3)}
    assert work.total > 1.3
    assert f"qkv {work.roles['qkv']:.2f}" in work.text()
    assert work.to_dict() == {"factor": round(work.total, 4), "roles": {"qkv": round(work.roles["qkv"], 4)}}


def halves(rows: IndexSet, other: IndexSet) -> tuple[Graph, Table]:
    net = GraphBuilder()
    x = net.linear("x", net.input("given", (8, 4), "f32"), roles.DENSE, {"w": 4}, bias=False)
    net.rows("answer", x, roles.TASK)
    return net.build(), Table({roles.DENSE: split_along([rows, other], 0)})


def test_what_two_devices_compute_alike_counts_twice():
    net, table = halves(span(0, 6), span(2, 8))
    lowered = Lowered(
        net, replace(table, optional_rules={roles.TASK: split_along([span(0, 6), span(6, 8)], 0)}), ("a", "b")
    )
    op = lowered.graph.by_name["x"]
    # b's rows 2:6 lie in a's, and only who needs them computes them.
    assert computed_and_distinct(op, lowered.tiles["x"]) == (8 * 4 * 4, 8 * 4 * 4)
    twice = [tile._replace(region=op.full_region) for tile in lowered.tiles["x"]]
    assert computed_and_distinct(op, twice) == (2 * 8 * 4 * 4, 8 * 4 * 4)
    assert computed_and_distinct(lowered.graph.by_name["answer"], lowered.tiles["answer"]) == (0, 0)
