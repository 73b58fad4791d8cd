"""Directories of models: tensors, tiles, hashes and tokenizers, and damaged ones."""

import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from question_cases import put
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from hepti_mqtt.checkpoint import KINDS, Checkpoint, directory, make_model, model_name, safetensors_file, storage
from hepti_mqtt.core.errors import BadNameError, ModelError, UnsupportedModelError, WeightsChangedError
from hepti_mqtt.models import full_ref, random_inputs, reference, representative_shape
from hepti_mqtt.protocol.manifest import tile_array, tile_hash

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


def all_tensors(path):
    with Checkpoint.open(path) as checkpoint:
        return dict(checkpoint.tensors())


@pytest.mark.parametrize("kind", ["tiny-bert-mlm", "tiny-vit"])
def test_all_tiles_of_the_manifest_put_together_are_the_tensors(made, kind):
    with Checkpoint.open(made[kind]) as checkpoint:
        tensors = checkpoint.tensors()
        entries = checkpoint.manifest.entries
        assert [entry.name for entry in entries] == list(tensors)
        for entry in entries:
            out = np.full((1, *entry.shape)[-2:], np.nan, np.float32)
            for place in entry.tiles():
                data = checkpoint.tile(place.hash)
                assert tile_hash(data) == place.hash
                tile = tile_array(place, data)
                out[place.row0 : place.row0 + tile.shape[0], place.column0 : place.column0 + tile.shape[1]] = tile
            np.testing.assert_array_equal(out.reshape(entry.shape), tensors[entry.name])
        for absent in (lambda: checkpoint.tile(b"x" * 32), lambda: tensors["absent"]):
            with pytest.raises(KeyError):
                absent()


def test_a_tensor_of_many_tiles_is_cut_at_256(bert):
    def widen(tensors):
        words = np.arange(600 * 32, dtype=np.float32).reshape(600, 32)
        return {**tensors, "bert.embeddings.word_embeddings.weight": words}

    rewrite(bert, widen)
    put(CONFIG, vocab_size=600)(bert)
    with Checkpoint.open(bert) as checkpoint:
        places = list(checkpoint.manifest.by_name["stem.word"].tiles())
        assert [(p.row0, p.stored_shape) for p in places] == [(0, (256, 32)), (256, (256, 32)), (512, (88, 32))]
        for place in reversed(places):
            tile = tile_array(place, checkpoint.tile(place.hash))
            assert tile[0, 0] == place.row0 * 32


@pytest.mark.parametrize("prefix", ["bert.", ""])
def test_names_of_other_writers_are_found(bert, made, prefix):
    """Without the prefix of the task models, and with TensorFlow's gamma and beta."""

    def rename(tensors):
        out = {}
        for name, value in tensors.items():
            name = prefix + name.removeprefix("bert.")
            name = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            out[name] = value
        # A buffer that older versions stored; it is not read, so its dtype does not matter.
        return {**out, "bert.embeddings.position_ids": np.arange(40)}

    rewrite(bert, rename)
    want = all_tensors(made["tiny-bert"])
    got = all_tensors(bert)
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value)


@pytest.mark.parametrize("name", ["q_proj.bias", "q_proj.lora_A.weight", "q_proj.weight_scale"])
def test_a_tensor_that_is_not_read_beside_a_weight_that_is_read_is_refused(tmp_path, name):
    path = make_model("tiny-llama", tmp_path / "model", seed=3)
    rewrite(path, lambda tensors: {**tensors, "model.layers.1.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)})
    Checkpoint.open(path).close()
    rewrite(path, lambda tensors: {**tensors, f"model.layers.1.self_attn.{name}": np.ones(32, np.float32)})
    with pytest.raises(UnsupportedModelError):
        Checkpoint.open(path)


# A model's word embeddings, its decoder to the vocabulary, and another name of the decoder's bias.
DECODERS = {
    "tiny-bert-mlm": ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder", "cls.predictions.bias"),
    "tiny-roberta-mlm": ("roberta.embeddings.word_embeddings.weight", "lm_head.decoder", "lm_head.bias"),
    "tiny-albert-mlm": ("albert.embeddings.word_embeddings.weight", "predictions.decoder", "predictions.bias"),
    "tiny-distilbert-mlm": ("distilbert.embeddings.word_embeddings.weight", "vocab_projector", None),
    "tiny-electra-mlm": ("electra.embeddings.word_embeddings.weight", "generator_lm_head", None),
    "tiny-gpt2": ("transformer.wte.weight", "lm_head", None),
    "tiny-qwen3-text": ("model.embed_tokens.weight", "lm_head", None),
}


@pytest.fixture(params=DECODERS)
def decoder(request, tmp_path):
    """Return a directory whose word embeddings and logits are tied, and the names of their tensors."""
    return make_model(request.param, tmp_path / "model", seed=3), DECODERS[request.param]


def normals(like, seed):
    return np.random.default_rng(seed).standard_normal(like.shape).astype(np.float32)


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_stored_as_the_decoders_own_counts(decoder, tied):
    path, (words, name, bias) = decoder
    stored = load_file(path / "model.safetensors")
    assert f"{name}.weight" not in stored, "a tied decoder is stored as the word embeddings alone"
    own = {f"{name}.weight": normals(stored[words], 1)}
    if bias is not None:
        own[f"{name}.bias"] = normals(stored[bias], 2)
    save_file({**stored, **own}, path / "model.safetensors")
    put(CONFIG, tie_word_embeddings=tied)(path)
    tensors = all_tensors(path)
    with Checkpoint.open(path) as checkpoint:
        assert full_ref(checkpoint.spec, "stem.word").tensor == "stem.word"
    np.testing.assert_array_equal(tensors["stem.word"], stored[words])
    np.testing.assert_array_equal(tensors["head.decoder.weight"], own[f"{name}.weight"].T)
    if bias is not None:
        np.testing.assert_array_equal(tensors["head.decoder.bias"], own[f"{name}.bias"])


def test_of_two_tied_tensors_the_stored_one_counts(decoder):
    path, (words, name, _) = decoder
    before = all_tensors(path)
    np.testing.assert_array_equal(before["head.decoder.weight"], before["stem.word"].T)
    rewrite(path, lambda tensors: {f"{name}.weight" if n == words else n: v for n, v in tensors.items()})
    after = all_tensors(path)
    assert after.keys() == before.keys()
    for tensor, values in before.items():
        np.testing.assert_array_equal(after[tensor], values)


def test_an_untied_decoder_that_is_not_stored_is_missing(decoder):
    path, (_, name, _) = decoder
    put(CONFIG, tie_word_embeddings=False)(path)
    with pytest.raises(ModelError) as caught:
        Checkpoint.open(path)
    assert f"{name}.weight" in str(caught.value)


def test_tied_tensors_share_their_tiles(made):
    with Checkpoint.open(made["tiny-bert-mlm"]) as checkpoint:
        entries = checkpoint.manifest.by_name
    assert entries["head.decoder.weight"].hashes == entries["stem.word"].hashes
    assert entries["head.decoder.weight"].shape == entries["stem.word"].shape[::-1]


def test_an_encoder_without_pooler_embeds_by_its_first_row(bert):
    rewrite(bert, lambda tensors: {k: v for k, v in tensors.items() if "pooler" not in k})
    with Checkpoint.open(bert) as checkpoint:
        assert (checkpoint.spec.head.pooling, checkpoint.spec.head.pooler) == ("cls", False)


DTYPES = {"f16": np.float16, "f32": np.float32, "f64": np.float64}


@pytest.mark.parametrize(("stored_as", "kept_as"), [("f16", "f16"), ("f64", "f32"), ("bf16", "f32")])
def test_half_precision_stays_half_in_tiles_and_other_floats_become_f32(bert, made, stored_as, kept_as):
    if stored_as == "bf16":
        write_bfloat16(bert / WEIGHTS, load_file(made["tiny-bert"] / WEIGHTS))
    else:
        rewrite(bert, lambda tensors: {k: v.astype(DTYPES[stored_as]) for k, v in tensors.items()})
    with Checkpoint.open(bert) as checkpoint:
        assert {entry.dtype for entry in checkpoint.manifest.entries} == {kept_as}
        for name, value in all_tensors(made["tiny-bert"]).items():
            bits = np.ascontiguousarray(value).view(np.uint32) >> 16 << 16
            want = bits.view(np.float32) if stored_as == "bf16" else value.astype(DTYPES[stored_as])
            tensor = checkpoint.tensors()[name]
            assert tensor.dtype == np.float32
            np.testing.assert_array_equal(tensor, want)
        place = checkpoint.manifest.by_name["layers.0.query.weight"].tile_at(0, 0)
        assert tile_array(place, checkpoint.tile(place.hash)).dtype == DTYPES[kept_as]


def write_bfloat16(path, tensors):
    header, body = {}, b""
    for name, value in tensors.items():
        data = (value.view(np.uint32) >> 16).astype("<u2").tobytes()
        header[name] = {"dtype": "BF16", "shape": list(value.shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def test_sharded_weights_are_the_same_model(bert, made):
    shard(bert)
    with Checkpoint.open(made["tiny-bert"], "a") as whole, Checkpoint.open(bert, "a") as sharded:
        assert sharded.manifest == whole.manifest, "it depends on the weights alone"
        for name, value in whole.tensors().items():
            np.testing.assert_array_equal(sharded.tensors()[name], value)


def hashes_of(checkpoint):
    return [place.hash for entry in checkpoint.manifest.entries for place in entry.tiles()]


def read_all(checkpoint, hashes):
    for digest in hashes:
        checkpoint.tile(digest)


@pytest.mark.parametrize("spoil", ["cut", "overwritten"])
def test_weights_that_change_while_they_are_served_are_noticed(bert, spoil):
    with Checkpoint.open(bert) as checkpoint:
        hashes = hashes_of(checkpoint)
        with (bert / "model.safetensors").open("r+b") as file:
            file.seek(-(32 * 4 * 100) if spoil == "cut" else -4, os.SEEK_END)
            file.truncate() if spoil == "cut" else file.write(struct.pack("<f", 123.0))
        with pytest.raises(ModelError):
            read_all(checkpoint, hashes)
    checkpoint.close()
    with pytest.raises(ModelError):
        checkpoint.tensors()["stem.word"]


def test_a_model_is_never_resident():
    """Make, hash and read 90 MB of weights; the largest array of a tile's band is one megabyte."""
    code = """
import resource, sys, tempfile
from hepti_mqtt.checkpoint import Checkpoint, make_model
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with tempfile.TemporaryDirectory() as root:
    make_model("tiny-bert", root + "/first")
    before = peak()
    with Checkpoint.open(make_model("minilm", root + "/model")) as checkpoint:
        for entry in checkpoint.manifest.entries:
            for place in entry.tiles():
                checkpoint.tile(place.hash)
print((peak() - before) / 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 35


@pytest.mark.parametrize(
    ("name", "want"), [("BERT Large (v2)", "bert-large-v2"), ("model", "model"), ("---", "model"), ("a" * 99, "a" * 64)]
)
def test_names_for_topics_are_made_from_directories(tmp_path, name, want):
    assert model_name(tmp_path / name) == want


def test_a_name_that_cannot_stand_in_a_topic_is_refused(made):
    with pytest.raises(BadNameError):
        Checkpoint.open(made["tiny-bert"], "a/b")
    with Checkpoint.open(made["tiny-bert"]) as checkpoint:
        assert (checkpoint.model, checkpoint.manifest.model) == ("tiny-bert", "tiny-bert")


@pytest.fixture
def hashes(monkeypatch):
    """The hashes of tiles that are computed."""
    counter = Mock(wraps=tile_hash)
    monkeypatch.setattr(directory, "tile_hash", counter)
    return counter


def manifest_of(path, name="a"):
    with Checkpoint.open(path, name) as checkpoint:
        return checkpoint.manifest


def test_a_second_start_hashes_nothing(bert, hashes):
    first = manifest_of(bert)
    assert hashes.called
    hashes.reset_mock()
    assert manifest_of(bert) == first
    assert manifest_of(bert, "b").entries == first.entries
    assert manifest_of(bert, "b").model == "b"
    assert not hashes.called


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: data[:50] + b"x" + data[51:],
        lambda data: hashlib.sha256(b"no manifest").digest() + b"no manifest",
    ],
)
def test_a_damaged_cache_is_made_again(bert, cache, hashes, spoil):
    first = manifest_of(bert)
    (kept,) = (cache / "hepti" / "manifests").iterdir()
    good = kept.read_bytes()
    kept.write_bytes(spoil(good))
    hashes.reset_mock()
    assert manifest_of(bert) == first
    assert hashes.called
    assert kept.read_bytes() == good


def test_a_cache_that_cannot_be_written_is_done_without(bert, cache):
    (cache / "hepti").write_text("a file where the directory should be")
    assert manifest_of(bert).entries


def drop(tensors, part):
    return {k: v for k, v in tensors.items() if part not in k}


@settings(deadline=None)
@given(st.data())
def test_every_truncation_of_the_weights_is_a_model_error(made, tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "truncated"
    if not path.exists():
        shutil.copytree(made["tiny-bert"], path)
    whole = (made["tiny-bert"] / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(ModelError):
        Checkpoint.open(path)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_files_are_closed_when_opening_fails(bert, made):
    rewrite(bert, lambda tensors: drop(tensors, "word"))
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with pytest.raises(ModelError):
            Checkpoint.open(bert)
        Checkpoint.open(made["tiny-bert"]).close()
    assert len(os.listdir("/proc/self/fd")) <= len(before)


@pytest.mark.parametrize("as_object", [False, True])
def test_the_mask_token_is_the_one_that_the_files_name(bert, as_object):
    token = "word7"
    named = {"mask_token": {"content": token, "lstrip": True} if as_object else token}
    (bert / "special_tokens_map.json").write_text(json.dumps(named))
    with Checkpoint.open(bert) as checkpoint:
        assert checkpoint.mask_id == checkpoint.tokenizer.token_to_id(token) is not None
    (bert / "special_tokens_map.json").unlink()
    with Checkpoint.open(bert) as checkpoint:
        assert checkpoint.mask_id == checkpoint.tokenizer.token_to_id("[MASK]")


def test_a_tokenizer_without_mask_token_is_an_error(bert):
    text = (bert / "tokenizer.json").read_text().replace("[MASK]", "[OTHER]")
    (bert / "tokenizer.json").write_text(text)
    with Checkpoint.open(bert) as checkpoint, pytest.raises(ModelError):
        assert checkpoint.mask_id


def rewrite(path, change):
    """Change the stored tensors of a directory."""
    tensors = load_file(path / "model.safetensors")
    save_file(change(tensors), path / "model.safetensors")


def shard(path, parts=3):
    """Divide a directory's weights into files with an index."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    weight_map = {}
    for i in range(parts):
        name = f"model-{i + 1:05}-of-{parts:05}.safetensors"
        part = {k: tensors[k] for k in sorted(tensors)[i::parts]}
        save_file(part, path / name)
        weight_map.update(dict.fromkeys(part, name))
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    "changes", [*({"num_parts": n} for n in (5, 2, None)), {"num_groups": 3}, {"num_groups": 4}, "tiny-bert"], ids=str
)
def test_a_decoupled_checkpoint_and_one_of_other_groups_and_parts_are_told_apart(tmp_path, changes):
    path = make_model("tiny-debert", tmp_path / "model")
    if changes == "tiny-bert":
        (path / CONFIG).unlink()
    put(CONFIG, **(KINDS["tiny-bert"].config if changes == "tiny-bert" else changes))(path)
    with pytest.raises(ModelError):
        Checkpoint.open(path)


# ----------------------------------------------------------------------------------------------------------------------
# Files and directories that are no model's, or a damaged one's.

SHARD, LAST = "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 90405214\n"


def written(*files, text):
    def write(path):
        for file in files:
            (path / file).parent.mkdir(exist_ok=True, parents=True)
            (path / file).write_text(text)

    return write


def without(file):
    return lambda path: (path / file).unlink()


def stored(change):
    return lambda path: rewrite(path, change)


def sharded(spoil):
    return lambda path: (shard(path), spoil(path))


def only(*files):
    """Return a change that leaves files of another program, and perhaps the config."""

    def replace_all(path):
        config = (path / CONFIG).read_text()
        shutil.rmtree(path)
        for file in files:
            written(file, text=config if file == CONFIG else "{}")(path)

    return replace_all


def inside(name, *others):
    """Return a change that moves the model into a directory of its directory."""

    def move(path):
        model = path.rename(path.with_name("moved"))
        path.mkdir()
        model.rename(path / name)
        written(*others, text="[]")(path)

    return move


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (shutil.rmtree, "bert"),
        (without(CONFIG), CONFIG),
        *((written(CONFIG, text=text), CONFIG) for text in ("{", "[" * 100000, "[]")),
        (lambda p: (p / CONFIG).write_bytes(b"\xff"), CONFIG),
        (written("modules.json", text="nonsense"), "modules.json"),
        *((written("tokenizer.json", text=text), "tokenizer.json") for text in ("{}", "", '{"version": "1.0"}')),
        (without(WEIGHTS), "bert"),
        (stored(lambda t: {"other": np.zeros(3, np.float32)}), "word_embeddings.weight"),
        (stored(lambda t: drop(t, "encoder.layer.1.output.dense.bias")), "encoder.layer.1.out"),
        (stored(lambda t: {f"module.{k}": v for k, v in t.items()}), "'module.'"),
        (stored(lambda t: {k.replace(".query.", ".query.base_layer."): v for k, v in t.items()}), "merge_and_unload"),
        (stored(lambda t: {k: v[..., :16].copy() for k, v in t.items()}), "[211, 16]"),
        (stored(lambda t: {k: v.astype(np.int32) for k, v in t.items()}), "I32"),
        (sharded(without(SHARD)), SHARD),
        (sharded(written(SHARD, text="abc")), SHARD),
        *((sharded(written(INDEX, text=text)), INDEX) for text in ("{}", "[]", '{"weight_map": {"a": "../x"}}')),
        *((written(f, text=POINTER), f) for f in (WEIGHTS, CONFIG, "tokenizer.json", "1_Pooling/config.json")),
        (written(WEIGHTS, text=POINTER), "git lfs pull"),
        *((sharded(written(SHARD, LAST, text=POINTER)), shard) for shard in (SHARD, LAST)),
        (written(WEIGHTS, text="<!DOCTYPE html>" * 10), "/resolve/"),
        (written(WEIGHTS, text="PK\x03\x04" * 10), "PyTorch"),
        (written(WEIGHTS, text="GGUF\x03\0\0\0" * 10), ".gguf"),
        (only("model.bin", "vocabulary.json"), "CTranslate2"),
        (only("bert-q4_k_m.gguf"), "bert-q4_k_m.gguf"),
        (only("onnx/model.onnx", CONFIG), "onnx/model.onnx"),
        (only("tf_model.h5", CONFIG), "TensorFlow"),
        (only("model.fp16.safetensors", CONFIG), "model.fp16.safetensors"),
        (only("openvino_model.xml", "openvino_model.bin"), "OpenVINO"),
        (only("README.md"), "download"),
        (
            lambda p: (only()(p), written(CONFIG, text='{"architectures": ["FalconForCausalLM"]}')(p)),
            "FalconForCausalLM",
        ),
        (inside("tiny"), "tiny"),
        (inside("0_Transformer", "modules.json"), "0_Transformer"),
    ],
)
def test_a_directory_that_is_no_model_is_refused_by_what_is_wrong(bert, spoil, named):
    spoil(bert)
    with pytest.raises(ModelError) as caught:
        Checkpoint.open(bert)
    assert named in str(caught.value)


def test_a_folder_of_hugging_faces_cache_is_the_model(made, tmp_path, monkeypatch):
    repository = tmp_path / "hub" / "models--sentence-transformers--all-MiniLM-L6-v2"
    first, second = (repository / "snapshots" / name for name in ("0aa1", "1bb2"))
    (repository / "blobs").mkdir(parents=True)
    first.mkdir(parents=True)
    for path in made["tiny-bert"].iterdir():
        shutil.copy(path, repository / "blobs" / f"b-{path.name}")
        (first / path.name).symlink_to(repository / "blobs" / f"b-{path.name}")
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in (repository, repository / "snapshots", first, "~/hub/models--sentence-transformers--all-MiniLM-L6-v2"):
        with Checkpoint.open(path) as checkpoint:
            assert (checkpoint.path, checkpoint.model) == (first, "all-minilm-l6-v2")
    shutil.copytree(made["tiny-vit"], second)
    with pytest.raises(ModelError) as caught:
        Checkpoint.open(repository)
    assert str(first) in str(caught.value)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("1bb2")
    with Checkpoint.open(repository) as checkpoint:
        assert checkpoint.path == second


# ----------------------------------------------------------------------------------------------------------------------
# The kept manifest and replaced files.


def frozen_stamp(path, status):
    """Return what a file in a read-only image of fixed times and inodes shows, whatever is in it."""
    return storage.FileStamp(str(path), status.st_size, 1, 1, 7)


@pytest.mark.parametrize("image", [False, True])
@pytest.mark.parametrize("tensor", ["encoder.layer.1.output.dense.bias", "bert.pooler.dense.weight"])
def test_replaced_weights_of_the_same_size_and_time_are_hashed_again(bert, monkeypatch, image, tensor):
    if image:
        monkeypatch.setattr(safetensors_file, "file_stamp", frozen_stamp)
    rewrite(bert, lambda tensors: tensors)
    before, file = manifest_of(bert), bert / WEIGHTS
    status = file.stat()
    rewrite(bert, lambda tensors: {k: v + np.float32(tensor in k) for k, v in tensors.items()})
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    after = manifest_of(bert)
    assert after != before
    with Checkpoint.open(bert, "a") as checkpoint:
        read_all(checkpoint, hashes_of(checkpoint))


def test_a_manifest_that_does_not_fit_its_file_is_kept_no_longer(bert, monkeypatch):
    """A disk decays without a new stamp: the next start must hash again, or it would end for ever."""
    monkeypatch.setattr(safetensors_file, "file_stamp", frozen_stamp)
    before = manifest_of(bert)
    with (bert / WEIGHTS).open("r+b") as file:  # a row that no sample has
        with safe_open(bert / WEIGHTS, framework="np") as stored:
            words = stored.get_tensor("bert.embeddings.word_embeddings.weight")
        at = (bert / WEIGHTS).read_bytes().index(words[7].tobytes())
        file.seek(at)
        file.write(b"\0" * 8)
    with Checkpoint.open(bert, "a") as checkpoint:
        assert checkpoint.manifest == before
        with pytest.raises(WeightsChangedError):
            read_all(checkpoint, hashes_of(checkpoint))
    with Checkpoint.open(bert, "a") as checkpoint:
        assert checkpoint.manifest != before
        read_all(checkpoint, hashes_of(checkpoint))


@pytest.mark.parametrize("kind", ["tiny-gpt2", "tiny-qwen3", "tiny-vgg"])
def test_a_reference_that_reads_matrices_in_bands_is_the_same(kind, tmp_path, monkeypatch):
    with Checkpoint.open(make_model(kind, tmp_path / "model", seed=5), "model") as model:
        spec = model.spec
        shape = representative_shape(spec, 8).with_want("hidden")
        inputs = random_inputs(spec, shape, np.random.default_rng(0))
        whole = reference(spec, model.tensors(), inputs, shape)[0]
        monkeypatch.setattr(directory, "BAND_BYTES", 256)
        np.testing.assert_allclose(reference(spec, model.tensors(banded=True), inputs, shape)[0], whole, 1e-4, 1e-5)


def test_tiles_of_words_have_places_of_any_size(tmp_path):
    with Checkpoint.open(make_model("tiny-bert", tmp_path / "model", seed=5), "model") as model:
        words = [(row, column) for _, row, column in model.tiles(np.array([7, 3], np.int32))["stem.word"]]
    assert words == [(3, 0), (7, 0)]
    assert all(isinstance(row, int) for row, _ in words), "an int32 overflows in a file of several GB"
