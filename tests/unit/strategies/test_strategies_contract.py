"""Every strategy gives the single-device result, in every family, for any devices and shares, on a faulty network."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from program_builder import validate
from sites import FAMILIES, METHODS, TOLERANCE, always, method_id, plan, request, sent_bytes, tensors
from swarm import Swarm, plan_of
from together import bound, run_programs, run_together

from hepti_mqtt import models
from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.core.errors import PlanError
from hepti_mqtt.core.ids import PLANNER
from hepti_mqtt.core.program import Compute, Program, Recv, Send, publish_targets, slots_written
from hepti_mqtt.cost.simulator import TopicNames
from hepti_mqtt.models.shapes import TextInput, TokenBatch
from hepti_mqtt.strategies import STRATEGIES
from hepti_mqtt.strategies.plan_programs import device_programs, resident_weights, sources_of

SITES = {
    "two": (1.0, 1.0),
    "two uneven": (1.0, 9.0),
    "three, one nearly nothing": (1.0, 5.0, 0.01),
    "three, head without a share": (0.0, 1.0, 2.0),
    "five": (1.0, 1.0, 1.0, 1.0, 1.0),
    "five, more than heads": (3.0, 1.0, 1.0, 2.0, 0.1),
    "more devices than rows of the shortest": (1.0,) * 7,
}
NAMES = [*map(method_id, METHODS)]
BATCHES = {"one": (13,), "ragged": (5, 7, 3), "single token": (1,), "cut between sequences": (6, 6)}


def methods_for(n: int) -> list[tuple[str, dict[str, str]]]:
    return [m for m in METHODS if STRATEGIES[m[0]].max_devices in {None, *range(n, 100)}]


def division(method, site):
    """Return the weights of a site, or those of one device where a method divides nothing."""
    weights = SITES[site]
    return weights if method in methods_for(len(weights)) else (1.0,)


def sites_of(method):
    """Return sites that differ for a method: one of each number of devices where all shares are equal."""
    equal = STRATEGIES[method[0]].equal_shares
    return list({(len(d) if equal else d): site for site in SITES for d in [division(method, site)]}.values())


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_equals_the_reference_and_the_predicted_bytes_on_a_faulty_network(method):
    """Every method once over frames and sessions, at families and sites that alternate; all batches run at once."""
    place = METHODS.index(method)
    family = list(FAMILIES)[place % len(FAMILIES)]
    spec = FAMILIES[family]
    chosen = plan(spec, method, division(method, list(SITES)[place % len(SITES)]))
    hosts = dict.fromkeys(chosen.devices, (1e9, 1 << 30))
    swarm = Swarm(spec, tensors(spec), hosts, seed=place, decider=always(chosen), duplicates=0.2, jitter_s=0.01)
    expected = {}
    for turn, (batch, lengths) in enumerate(BATCHES.items()):
        shape, inputs = request(spec, lengths, "hidden" if turn % 2 else "task")
        if shape.tokens > models.largest_shape(spec).tokens:
            continue  # a device refuses it: a run has one picture
        expected[batch] = shape, models.reference(spec, tensors(spec), inputs, shape)[0 if turn % 2 else 1]
        swarm.submit(batch, shape, inputs)
    swarm.run(60, until=lambda: set(expected) <= set(swarm.answers) or bool(swarm.errors))
    assert not swarm.errors, [n.text for n in swarm.notes]
    swarm.run(1)
    active = plan_of(swarm)
    assert active is not None
    for batch, (shape, wanted) in expected.items():
        [(got, stats)] = swarm.answers[batch]
        np.testing.assert_allclose(got, wanted, atol=TOLERANCE)
        counted = sum(s.dispatch_bytes + sum(s.sent_bytes.values()) for s in stats)
        assert counted == sent_bytes(TopicNames("home", "m"), spec, shape, device_programs(spec, active, shape))


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_same_plan_and_batch_same_bits_whatever_the_order_of_arrival(method):
    spec, held = FAMILIES["bert-embedding"], tensors(FAMILIES["bert-embedding"])
    weights = (1.0, 2.0, 1.5) if method in methods_for(3) else (1.0,)
    shape, inputs = request(spec, (13, 4), "hidden")
    parts = bound(device_programs(spec, plan(spec, method, weights), shape), held)
    assert len({run_together(parts, inputs, seed).tobytes() for seed in range(4)}) == 1


share = st.one_of(st.just(0.0), st.floats(0.01, 10.0))


@settings(max_examples=60, deadline=None)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    method=st.sampled_from(METHODS),
    weights=st.lists(share, min_size=1, max_size=8).filter(any),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    want=st.sampled_from(["task", "hidden"]),
    head=st.integers(0, 7),
)
def test_programs_fit_together(family, method, weights, lengths, want, head):
    """Every Recv has exactly one Send of the same shape, every Send of a named device a Recv; weights are resident."""
    spec = FAMILIES[family]
    if method not in methods_for(len(weights)):
        weights = [1.0]
    chosen = plan(spec, method, weights, head % len(weights))
    shape, _ = request(spec, lengths, want)
    parts = device_programs(spec, chosen, shape)
    sent: dict[tuple[int, int, str, str], tuple[int, ...]] = {}
    for name, program in parts.items():
        validate(program)
        assert set(program.weights()) <= set(resident_weights(spec, chosen, name))
        for op in program.ops:
            assert isinstance(op, Compute | Send | Recv)
            if isinstance(op, Send):
                for to in op.to:
                    key = (op.node, op.part, name, to)
                    assert key not in sent
                    sent[key] = program.slots[op.slot].shape
    received = {
        (*op.key, name): program.slots[op.slot].shape
        for name, program in parts.items()
        for op in program.ops
        if isinstance(op, Recv) and op.source != "planner"
    }
    assert {k: v for k, v in sent.items() if k[3] != "planner"} == received
    outputs = [k for k in sent if k[3] == "planner"]
    assert len(outputs) == 1
    assert outputs[0][2] == chosen.root


@pytest.mark.parametrize("method", methods_for(5), ids=method_id)
def test_more_devices_than_the_longest_text_has_tokens_hold_and_hear_all_that_a_request_needs(method):
    spec = replace(FAMILIES["bert-embedding"], max_tokens=3)
    chosen = plan(spec, method, (0.4, 9.0, 0.0, 2.0, 3.0), head=2)
    for length, want in itertools.product((1, 2, 3), ("task", "hidden")):
        for device, program in device_programs(spec, chosen, request(spec, (length,), want)[0]).items():
            assert set(program.weights()) <= set(resident_weights(spec, chosen, device))
            assert set(program.sources()) - {"planner"} <= sources_of(spec, chosen, device)


OTHERS = [
    (name, dict(options), devices)
    for name in dict.fromkeys(name for name, _ in METHODS)
    for devices in (4, 6)
    for options in STRATEGIES[name].variants_for(devices)
    if (name, dict(options)) not in METHODS
]


def test_the_last_layer_computes_only_what_the_task_needs():
    spec = FAMILIES["bert-classifier"]
    shape, _ = request(spec, (13,))
    for method in METHODS:
        weights = (1.0, 1.0) if method in methods_for(2) else (1.0,)
        for program in device_programs(spec, plan(spec, method, weights), shape).values():
            rows = [
                program.slots[op.writes[0]].shape[0]
                for op in program.ops
                if isinstance(op, Compute) and op.layer == spec.layers - 1 and "mlp_up" in str(op.weights)
            ]
            assert all(r == 1 for r in rows)


@pytest.mark.parametrize("name", [n for n, s in STRATEGIES.items() if s.max_devices is None])
def test_shares_of_many_devices_cover_everything_once(name):
    graph = models.graph(FAMILIES["bert-embedding"], TokenBatch((20,)))
    if STRATEGIES[name].why_unsupported(graph):
        pytest.skip(f"{name} does not divide this family")
    _, ranges = STRATEGIES[name].make_shares(graph, {}, (1.0, 0.0, 3.0, 0.2))
    for kind, owned in ranges.items():
        parts = sorted(part for part in owned if part[0] < part[1])  # stages may stand on the devices in any order
        assert parts[0][0] == 0, kind
        assert all(a[1] == b[0] for a, b in itertools.pairwise(parts)), kind
        assert STRATEGIES[name].equal_shares or owned[1][0] == owned[1][1], kind


SPECS = {
    kind: spec_of_kind(kind)
    for kind in (
        *("tiny-debert", "tiny-devit", "tiny-convnet", "tiny-resnet", "tiny-mobilenet", "tiny-yolo"),
        *("tiny-convnext", "tiny-efficientnet"),
    )
}
LONG = {"tiny-mobilenet"}
ABLE = [
    pytest.param(kind, name, marks=[pytest.mark.nightly] if kind in LONG else [])
    for kind, spec in SPECS.items()
    for name, method in STRATEGIES.items()
    if method.why_unsupported(models.graph(spec, models.largest_shape(spec))) is None
]
SHARES = ((1.0,), (1.0, 2.0), (0.0, 1.0, 3.0), (1.0, 0.5, 2.0, 1.0, 1.0))


def batches(spec):
    return ((13,), (5, 7, 3)) if isinstance(spec.input_spec, TextInput) else ((1,),)


@pytest.mark.parametrize(("kind", "name"), ABLE)
def test_other_families_equal_the_reference(kind, name):
    """Every variant where it is possible first, and one of them in turn wherever devices differ."""
    spec, method = SPECS[kind], STRATEGIES[name]
    held, covered = tensors(spec), []
    for turn, weights in enumerate(SHARES[: method.max_devices]):
        variants = method.variants_for(len(weights), models.graph(spec, models.largest_shape(spec)))
        chosen = [o for place, o in enumerate(variants) if o not in covered or place == turn % len(variants)]
        covered += chosen
        for options in chosen:
            want, lengths = ("task", "hidden")[turn % 2], batches(spec)[turn // 2 % len(batches(spec))]
            shape, inputs = request(spec, lengths, want)
            fixed = plan(spec, (name, options), weights)
            parts = device_programs(spec, fixed, shape)
            for device, program in parts.items():
                validate(program)
                assert set(program.weights()) <= set(resident_weights(spec, fixed, device))
            hidden, output = models.reference(spec, held, inputs, shape)
            got = run_programs(parts, held, inputs)
            np.testing.assert_allclose(got, hidden if want == "hidden" else output, atol=TOLERANCE, rtol=1e-5)


@pytest.mark.parametrize("kind", ["tiny-debert", "tiny-resnet"])
def test_the_planner_chooses_for_a_site_with_faults_and_counts_its_bytes(kind):
    """Priced, planned, loaded, run on a network with duplicates, and counted exactly."""
    spec = SPECS[kind]
    swarm = Swarm(spec, tensors(spec), {f"d{i}": (1e7, 1 << 30) for i in range(3)}, duplicates=0.2, jitter_s=0.01)
    shape, inputs = request(spec, batches(spec)[0])
    swarm.submit("r", shape, inputs)
    swarm.run(60, until=lambda: "r" in swarm.answers or "r" in swarm.errors)
    assert "r" in swarm.answers, swarm.errors
    got, stats = swarm.answers["r"][0]
    np.testing.assert_allclose(got, models.reference(spec, tensors(spec), inputs, shape)[1], atol=TOLERANCE, rtol=1e-5)
    counted = sum(s.dispatch_bytes + sum(s.sent_bytes.values()) for s in stats)
    chosen = stats[0].plan
    assert counted == sent_bytes(TopicNames("home", "m"), spec, shape, device_programs(spec, chosen, shape))


GPT = spec_of_kind("tiny-gpt2")
CACHING = [n for n, s in STRATEGIES.items() if s.why_unsupported(models.graph(GPT, TokenBatch((1,), cache=64))) is None]


def unneeded(parts: Mapping[str, Program]) -> list[tuple[str, int]]:
    """Return (device, place) of the ops on which nothing depends that the planner is sent."""
    makers = {(d, slot): (d, i) for d, p in parts.items() for i, op in enumerate(p.ops) for slot in slots_written(op)}
    sends = [(d, i, op) for d, p in parts.items() for i, op in enumerate(p.ops) if isinstance(op, Send)]
    senders = {(op.node, op.part, d): (d, i) for d, i, op in sends}
    waiting = [(d, i) for d, i, op in sends if op.to == (PLANNER,)]
    needed: set[tuple[str, int]] = set()
    while waiting:
        device, place = at = waiting.pop()
        if at in needed:
            continue
        needed.add(at)
        program = parts[device]
        op = program.ops[place]
        if isinstance(op, Recv) and op.source != PLANNER:
            waiting.append(senders[op.key])
        waiting += [makers[device, slot] for slot in program.reads(op) if (device, slot) in makers]
    return [(d, i) for d, p in parts.items() for i in range(len(p.ops)) if (d, i) not in needed]


@settings(max_examples=60)
@given(
    name=st.sampled_from(CACHING),
    weights=st.lists(share, min_size=1, max_size=6).filter(any),
    head=st.integers(0, 5),
    tokens=st.integers(1, 20),
)
def test_all_of_a_step_is_needed_for_its_token(name, weights, head, tokens):
    weights = weights if STRATEGIES[name].max_devices is None else [1.0]
    chosen = plan(GPT, (name, {}), weights, head % len(weights))
    parts = device_programs(GPT, chosen, TokenBatch((tokens,), cache=64))
    kept = [op for p in parts.values() for op in p.ops if isinstance(op, Compute) and op.kernel == "append_rows"]
    assert len(kept) >= GPT.layers
    assert not unneeded(parts)


# Every method with every family; half of the pairs wait for the night. By four families: sites and batches alternate.
PAIRS = [
    pytest.param(family, method, marks=[pytest.mark.nightly] * ((i // 4 + j) % 2), id=f"{family}-{NAMES[j]}")
    for i, family in enumerate(FAMILIES)
    for j, method in enumerate(METHODS)
]


def at_once(program: Program) -> Counter[str]:
    """Return how many frames more than one go to each peer with nothing computed or received between them."""
    published, run, came = Counter[str](), set[str](), set[int]()
    for op in program.ops:
        if isinstance(op, Compute):
            run.clear()
        elif isinstance(op, Recv):
            came.add(program.base(op.slot))
        elif program.base(op.slot) not in came:  # what only passes through leaves when it comes
            published.update(run.intersection(publish_targets(op)))
            run.update(publish_targets(op))
    return published


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_and_values_queries_and_parts_for_one_peer_are_one_frame(family: str) -> None:
    spec, sending = FAMILIES[family], 0
    shape, _ = request(spec, (13,))
    devices = min(3, spec.kv_heads)  # a ring passes on what a device without heads has nothing to add to
    for method in METHODS:
        try:
            parts = device_programs(spec, plan(spec, method, (1.0,) * devices), shape)
        except PlanError:
            continue  # not on three devices, or not this family
        for device, program in parts.items():
            assert not at_once(program), f"{method} on {device}"
            sending += sum(isinstance(op, Send) for op in program.ops)
    assert sending


def agrees(family, method, weights, place, **network):
    """Check a run of a batch by its place against the reference, with frames in any order; every op is needed."""
    spec, held = FAMILIES[family], tensors(FAMILIES[family])
    shape, inputs = request(spec, list(BATCHES.values())[place % 4], "hidden" if place % 2 else "task")
    parts = device_programs(spec, plan(spec, method, weights), shape)
    assert not unneeded(parts)
    expected = models.reference(spec, held, inputs, shape)[0 if place % 2 else 1]
    np.testing.assert_allclose(run_together(bound(parts, held), inputs, place, **network), expected, atol=TOLERANCE)


@pytest.mark.parametrize(("family", "method"), PAIRS)
def test_equals_the_reference_whatever_the_order_of_arrival(family, method):
    """Every method meets every family once, and over the families every site and batch."""
    place = list(FAMILIES).index(family) + METHODS.index(method)
    agrees(family, method, division(method, sites_of(method)[place % len(sites_of(method))]), place, duplicates=0.2)


@pytest.mark.parametrize(("name", "options", "devices"), OTHERS, ids=str)
def test_variants_that_depend_on_the_number_of_devices_equal_the_reference(name, options, devices):
    agrees("bert-embedding", (name, options), [1.0 + i % 3 for i in range(devices)], place=1)
