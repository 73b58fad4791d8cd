"""Every strategy gives the single-device result, in every family, for any devices and shares, on a faulty network."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sites import FAMILIES, METHODS, TOLERANCE, always, plan, request, tensors
from swarm import Swarm, plan_of
from together import bound, run_together

from hepti_mqtt import models
from hepti_mqtt.cost.simulator import Naming, sent_bytes
from hepti_mqtt.models.shapes import PackedTokens
from hepti_mqtt.plan_programs import peers, programs, resident_weights
from hepti_mqtt.program import Compute, Recv, Send, check
from hepti_mqtt.strategies import STRATEGIES

SITES = {
    "two": (1.0, 1.0),
    "two uneven": (1.0, 9.0),
    "three, one nearly nothing": (1.0, 5.0, 0.01),
    "three, head without a share": (0.0, 1.0, 2.0),
    "five": (1.0, 1.0, 1.0, 1.0, 1.0),
    "five, more than heads": (3.0, 1.0, 1.0, 2.0, 0.1),
    "more devices than rows of the shortest": (1.0,) * 7,
}
NAMES = ["-".join([name, *options.values()]) for name, options in METHODS]
BATCHES = {"one": (13,), "ragged": (5, 7, 3), "single token": (1,), "cut between sequences": (6, 6)}


def methods_for(n: int) -> list[tuple[str, dict[str, str]]]:
    return [m for m in METHODS if STRATEGIES[m[0]].most_devices in {None, *range(n, 100)}]


def division(method, site):
    """Return the weights of a site, or those of one device where a method divides nothing."""
    weights = SITES[site]
    return weights if method in methods_for(len(weights)) else (1.0,)


def sites_of(method):
    """Return sites that differ for a method: one of each number of devices where all shares are equal."""
    equal = STRATEGIES[method[0]].equal
    return list({(len(d) if equal else d): site for site in SITES for d in [division(method, site)]}.values())


def repeats(family, method, site):
    """Return whether others have shown it: a seeded kind has the blocks of the first ones, and is tried at one site."""
    sites = sites_of(method)
    return family.startswith("tiny-") and site != sites[METHODS.index(method) % len(sites)]


@pytest.mark.parametrize(
    ("family", "method", "site"),
    [
        pytest.param(
            family, m, site, id=f"{family}-{name}-{site}", marks=pytest.mark.wide if repeats(family, m, site) else []
        )
        for family in FAMILIES
        for m, name in zip(METHODS, NAMES, strict=True)
        for site in sites_of(m)
    ],
)
def test_equals_the_reference_whatever_the_order_of_arrival(family, method, site):
    """Each site has two of the four batches, so that every method and family has all of them at several sites."""
    spec, held = FAMILIES[family], tensors(FAMILIES[family])
    chosen = plan(spec, method, division(method, site))
    place = sites_of(method).index(site) + METHODS.index(method)
    for batch in (2 * place % 4, (2 * place + 1) % 4):
        want = "hidden" if batch % 2 else "task"
        shape, inputs = request(spec, list(BATCHES.values())[batch], want)
        hidden, output = models.reference(spec, held, inputs, shape)
        got = run_together(bound(programs(spec, chosen, shape), held), inputs, place, duplicates=0.2)
        np.testing.assert_allclose(got, hidden if want == "hidden" else output, atol=TOLERANCE)


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_reference_and_the_predicted_bytes_on_a_faulty_network(family, method):
    """Every method and family once over frames and sessions, at sites that alternate; all batches run at once."""
    spec, place = FAMILIES[family], METHODS.index(method)
    chosen = plan(spec, method, division(method, list(SITES)[(place + 2 * list(FAMILIES).index(family)) % len(SITES)]))
    swarm = Swarm(
        spec,
        tensors(spec),
        dict.fromkeys(chosen.devices, (1e9, 1 << 30)),
        seed=place,
        decider=always(chosen),
        duplicates=0.2,
        jitter_s=0.01,
    )
    asked = {}
    for turn, (batch, lengths) in enumerate(BATCHES.items()):
        shape, inputs = request(spec, lengths, "hidden" if turn % 2 else "task")
        if shape.tokens > models.largest_shape(spec).tokens:
            continue  # a device refuses it: a run has one picture
        asked[batch] = shape, models.reference(spec, tensors(spec), inputs, shape)[0 if turn % 2 else 1]
        swarm.submit(batch, shape, inputs)
    swarm.run(60, until=lambda: set(asked) <= set(swarm.answers) or bool(swarm.errors))
    assert not swarm.errors, [n.text for n in swarm.notes]
    swarm.run(1)
    active = plan_of(swarm)
    assert active is not None
    for batch, (shape, wanted) in asked.items():
        [(got, stats)] = swarm.answers[batch]
        np.testing.assert_allclose(got, wanted, atol=TOLERANCE)
        counted = sum(s.dispatch_bytes + sum(s.sent_bytes.values()) for s in stats)
        assert counted == sent_bytes(Naming("home", "m"), spec, shape, programs(spec, active, shape))


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_same_plan_and_batch_same_bits_whatever_the_order_of_arrival(method):
    spec, held = FAMILIES["bert-embedding"], tensors(FAMILIES["bert-embedding"])
    weights = (1.0, 2.0, 1.5) if method in methods_for(3) else (1.0,)
    shape, inputs = request(spec, (13, 4), "hidden")
    parts = bound(programs(spec, plan(spec, method, weights), shape), held)
    assert len({run_together(parts, inputs, seed).tobytes() for seed in range(8)}) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_column_gives_the_bits_of_one_device(family):
    spec, held = FAMILIES[family], tensors(FAMILIES[family])
    shape, inputs = request(spec, (9, 4), "hidden")
    alone, split = (
        run_together(bound(programs(spec, plan(spec, (name, {}), weights), shape), held), inputs)
        for name, weights in (("single", (1.0,)), ("column", (1.0, 2.0)))
    )
    np.testing.assert_allclose(split, alone, atol=1e-6)


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
    parts = programs(spec, chosen, shape)
    sent: dict[tuple[int, int, str, str], tuple[int, ...]] = {}
    for name, program in parts.items():
        check(program)
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
    assert outputs[0][2] == chosen.head


@pytest.mark.parametrize("method", methods_for(5), ids=lambda m: "-".join([m[0], *m[1].values()]))
@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0, 1.0, 9.0), (0.4, 9.0, 0.0, 2.0, 3.0)], ids=str)
def test_more_devices_than_the_longest_text_has_tokens_hold_and_hear_all_that_a_request_needs(method, weights):
    spec = replace(FAMILIES["bert-embedding"], max_tokens=3)
    chosen = plan(spec, method, weights, head=2)
    for length, want in itertools.product((1, 2, 3), ("task", "hidden")):
        for device, made in programs(spec, chosen, request(spec, (length,), want)[0]).items():
            assert set(made.weights()) <= set(resident_weights(spec, chosen, device))
            assert set(made.sources()) - {"planner"} <= peers(spec, chosen, device)


OTHERS = [
    (name, dict(options), devices)
    for name in dict.fromkeys(name for name, _ in METHODS)
    for devices in (4, 6)
    for options in STRATEGIES[name].choices(devices)
    if (name, dict(options)) not in METHODS
]


@pytest.mark.parametrize("family", ["bert-embedding", "vit-classifier"])
@pytest.mark.parametrize(("name", "options", "devices"), OTHERS, ids=str)
def test_variants_that_depend_on_the_number_of_devices_equal_the_reference(family, name, options, devices):
    spec, held = FAMILIES[family], tensors(FAMILIES[family])
    shape, inputs = request(spec, (5, 7, 3), "hidden")
    hidden, _ = models.reference(spec, held, inputs, shape)
    chosen = plan(spec, (name, options), [1.0 + i % 3 for i in range(devices)])
    got = run_together(bound(programs(spec, chosen, shape), held), inputs)
    np.testing.assert_allclose(got, hidden, atol=TOLERANCE)


def test_a_batch_cut_between_sequences_needs_no_exchange_of_keys():
    spec = FAMILIES["bert-embedding"]
    shape, _ = request(spec, (6, 6))
    parts = programs(spec, plan(spec, ("row", {"variant": "kv"}), (1.0, 1.0)), shape)
    nodes = {p.node(op.node) for p in parts.values() for op in p.ops if isinstance(op, Send)}
    assert nodes == {"embedded", f"{spec.layers - 1}.x", "unit"}


def test_the_last_layer_computes_only_what_the_task_needs():
    spec = FAMILIES["bert-classifier"]
    shape, _ = request(spec, (13,))
    for method in METHODS:
        weights = (1.0, 1.0) if method in methods_for(2) else (1.0,)
        for program in programs(spec, plan(spec, method, weights), shape).values():
            rows = [
                program.slots[op.writes[0]].shape[0]
                for op in program.ops
                if isinstance(op, Compute) and op.layer == spec.layers - 1 and "mlp_up" in str(op.weights)
            ]
            assert all(r == 1 for r in rows)


@pytest.mark.parametrize("name", [n for n, s in STRATEGIES.items() if s.most_devices is None])
def test_shares_of_many_devices_cover_everything_once(name):
    graph = models.graph(FAMILIES["bert-embedding"], PackedTokens((20,)))
    if STRATEGIES[name].unsupported(graph):
        pytest.skip(f"{name} does not divide this family")
    _, ranges = STRATEGIES[name].divide(graph, {}, (1.0, 0.0, 3.0, 0.2))
    for kind, owned in ranges.items():
        parts = sorted(part for part in owned if part[0] < part[1])  # stages may stand on the devices in any order
        assert parts[0][0] == 0, kind
        assert all(a[1] == b[0] for a, b in itertools.pairwise(parts)), kind
        assert STRATEGIES[name].equal or owned[1][0] == owned[1][1], kind
