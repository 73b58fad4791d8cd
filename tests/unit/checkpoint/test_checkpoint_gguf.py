"""GGUF files: a converted model is the original in everything, and what is none or not known is refused."""

import contextlib
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf_writer import converted
from golden_cases import GOLDEN
from question_cases import put
from tokenizers import Tokenizer

from hepti_mqtt.checkpoint import KINDS, Checkpoint, described_spec, make_model
from hepti_mqtt.checkpoint.gguf_tokenizer import tokenizer_files
from hepti_mqtt.core.errors import ModelError, UnsupportedModelError
from hepti_mqtt.core.storage import STORAGES


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = make_model("tiny-llama", tmp_path_factory.mktemp("llama") / "original")
    put("config.json", rope_scaling=None)(path)
    return path


@pytest.mark.parametrize(
    ("storage", "error"),
    [
        ("f32", 0),
        ("f16", 1e-3),
        ("bf16", 0.01),
        ("q8_0", 0.01),
        ("q5_1", 0.05),
        ("q5_0", 0.1),
        ("q4_1", 0.1),
        ("q4_0", 0.2),
    ],
)
def test_a_converted_model_is_the_original(original, tmp_path, storage, error):
    """Of queries and keys, too, whose rows stand in another order in the file."""
    path = converted(original, tmp_path / "m.gguf", storage, table="f16" if error else "f32")
    with Checkpoint.open(original) as want, Checkpoint.open(path) as got:
        assert replace(got.spec, storages=()) == want.spec
        assert got.end_tokens == want.end_tokens
        for name, array in want.tensors().items():
            np.testing.assert_allclose(got.tensors()[name], array, rtol=0, atol=error * np.abs(array).max())
        assert all(got.tile(digest) for entry in got.manifest.entries for digest in entry.hashes)


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 24}
NEAR = {"attention.sliding_window": 8}
COUNTS = {"expert_count": 6, "expert_used_count": 2}
GRANITE = {"attention.scale": 0.2, "embedding_scale": 3.0, "residual_scale": 0.4, "logit_scale": 4.0}
FAMILIES = {
    "tiny-qwen2": ("qwen2", {**YARN, "attention.key_length": None}),
    "tiny-qwen3-text": ("qwen3", {}),
    "tiny-gemma3-text": ("gemma3", {**NEAR, "attention.sliding_window_pattern": 2}),
    "tiny-phi3": ("phi3", NEAR),
    "tiny-qwen3-moe": ("qwen3moe", {**COUNTS, "expert_feed_forward_length": 64}),
    "tiny-mixtral": ("llama", {**COUNTS, "expert_count": 4}),
    "tiny-olmoe": ("olmoe", COUNTS),
    "tiny-smollm3": ("smollm3", {}),
    "tiny-granite": ("granite", GRANITE),
    "tiny-granite-moe": ("granitemoe", {**GRANITE, **COUNTS, "expert_used_count": 3}),
    "tiny-gpt-oss": ("gpt-oss", {**YARN, **NEAR, **COUNTS, "expert_feed_forward_length": 64}),
}


# Values that files of llama.cpp do not say.
UNSAID = {
    "tiny-smollm3": {"no_rope_layer_interval": 4},
    "tiny-gemma3-text": {"query_pre_attn_scalar": KINDS["tiny-gemma3-text"].config["head_dim"]},
    "tiny-gpt-oss": {"swiglu_limit": 7.0},
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_other_architectures_are_their_originals(tmp_path, kind):
    architecture, more = FAMILIES[kind]
    original = make_model(kind, tmp_path / "original")
    put("config.json", **UNSAID.get(kind, {}))(original)
    keys = {f"{architecture}.{key}": value for key, value in more.items()}
    ends = {"tokenizer.ggml.eot_token_id": 4} if architecture == "gemma3" else {}
    path = converted(original, tmp_path / "m.gguf", "f32", "f32", architecture, **keys, **ends)
    with Checkpoint.open(original) as want, Checkpoint.open(path) as got:
        assert got.spec == want.spec
        assert got.end_tokens == want.end_tokens
        for name, array in want.tensors().items():
            np.testing.assert_allclose(got.tensors()[name], array, rtol=0, atol=1e-6)
    path = converted(original, tmp_path / "q.gguf", "q8_0", "q8_0", architecture, **keys, **ends)
    with Checkpoint.open(path) as blocks:
        up = "experts.*.up" if blocks.spec.block.experts else "mlp_up"
        assert {"layers.*.query.weight", f"layers.*.{up}.weight"} <= dict(blocks.spec.storages).keys()
        assert all(blocks.tile(digest) for entry in blocks.manifest.entries for digest in entry.hashes)


@pytest.mark.parametrize(
    ("names", "reads"),
    [
        ([], True),
        ([f"blk.{i}.ffn_{part}.bias" for i in range(2) for part in ("gate", "up", "down")], True),
        (["blk.1.attn_q.bias"], False),
        (["blk.0.ffn_down.bias"], False),
        (["blk.0.attn_q.scale"], False),
        (["output.bias"], False),
    ],
    ids=str,
)
def test_every_tensor_of_a_file_is_read_or_refused(original, tmp_path, names, reads):
    widths = {"gate": 48, "up": 48, "down": 32}
    added = {name: (np.full(widths.get(name[10:-5], 32), 0.5, np.float32), "f32") for name in names}
    path = converted(original, tmp_path / "m.gguf", "f32", "f32", added=added)
    with contextlib.nullcontext() if reads else pytest.raises(ModelError), Checkpoint.open(path) as model:
        tensors = model.tensors()
        biases = [f"layers.{i}.mlp_{part}.bias" for i in range(2) for part in ("gate", "up", "down")]
        assert [name for name in biases if name in tensors] == (biases if names else [])
        assert all((tensors[name] == 0.5).all() for name in biases if names)


def test_a_split_model_is_its_parts(original, tmp_path):
    whole = converted(original, tmp_path / "whole.gguf", "q8_0")
    (tmp_path / "parts").mkdir()
    first = converted(original, tmp_path / "parts" / "m.gguf", "q8_0", files=3)
    others = sorted(first.parent.glob("*.gguf"))
    with Checkpoint.open(whole) as want:
        entries = want.manifest.entries
    for path in (first, first.parent, others[2]):
        with Checkpoint.open(path) as parts:
            assert parts.manifest.entries == entries
            assert all(parts.tile(digest) for entry in entries for digest in entry.hashes)
    for path, data in ((others[1], others[2].read_bytes()), (others[2], b""), (others[2], None)):
        before = path.read_bytes()
        path.write_bytes(data) if data is not None else path.unlink()
        with pytest.raises(ModelError):
            Checkpoint.open(first)
        path.write_bytes(before)
    with pytest.raises(ModelError):
        Checkpoint.open(others[0].rename(tmp_path / "renamed.gguf"))


PIECES = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0] * 211, "tokenizer.ggml.eos_token_id": None}


@pytest.mark.parametrize(
    ("more", "ends"),
    [
        ({}, (3,)),
        ({"tokenizer.ggml.eos_token_id": 0}, (0, 3)),
        ({"tokenizer.ggml.eos_token_id": 0, "control": ("<end_of_turn>", "<|im_end|>")}, (0, 1, 3)),
        ({"control": ("<|return|>", "<|end|>")}, (0, 1, 3)),
        ({"control": ("<|return|>", "<|call|>", "<|end|>")}, (0, 1, 3)),
        ({"tokenizer.ggml.token_type": [1] * 211}, (3,)),
        (PIECES, (2, 3)),
        (PIECES | {"tokenizer.ggml.token_type": [1] * 211}, (2,)),
    ],
)
def test_a_text_ends_at_the_named_tokens_and_at_control_tokens_by_their_names(original, tmp_path, more, ends):
    control = more.get("control", ())
    more = {key: value for key, value in more.items() if key != "control"}
    path = converted(original, tmp_path / "m.gguf", "f16", control=control, **more)
    with Checkpoint.open(path) as model:
        assert model.end_tokens == ends


def test_pieces_without_named_ids_begin_with_the_usual_token(original, tmp_path):
    with Checkpoint.open(converted(original, tmp_path / "m.gguf", "f16", **PIECES)) as model:
        assert model.tokenizer.encode("ab").ids[0] == 1


@pytest.mark.parametrize(
    ("more", "scaling"),
    [
        ({"factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"factor": 4.0, "type": "linear"}, {"rope_type": "linear", "factor": 4.0}),
        ({"factor": 4.0, "type": "none"}, None),
        ({"factor": 0.0}, None),
    ],
)
def test_a_factor_without_a_type_scales_linearly(original, tmp_path, more, scaling):
    keys = {f"llama.rope.scaling.{key}": value for key, value in more.items()}
    with Checkpoint.open(converted(original, tmp_path / "m.gguf", "f16", **keys)) as model:
        assert model.config.get("rope_scaling") == scaling


def test_a_directory_with_one_file_is_its_model(original, tmp_path):
    path = converted(original, tmp_path / "model.Q8_0.gguf", "q8_0")
    with Checkpoint.open(tmp_path) as of_directory, Checkpoint.open(path) as of_file:
        assert of_directory.manifest.entries == of_file.manifest.entries
    (tmp_path / "other.gguf").write_bytes(path.read_bytes())
    with pytest.raises(ModelError):
        Checkpoint.open(tmp_path)


def test_texts_are_read_by_the_files_own_tokenizer(original, tmp_path):
    """Digits one by one, control tokens as text, and BOS where the file says so."""
    for has_bos in (False, True):
        more = {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.add_bos_token": has_bos}
        with Checkpoint.open(converted(original, tmp_path / f"{has_bos}.gguf", "f16", **more)) as model:
            encoding = model.tokenizer.encode("ab10</s>")
            assert encoding.tokens == ["<s>"] * has_bos + ["ab", "1", "0", "<", "/", "s", ">"]
            assert model.tokenizer.decode(model.tokenizer.encode("aé b").ids) == "aé b"
            assert {0, 2, 3} <= model.texts.controls
            assert model.extras["tokenizer_config.json"]["chat_template"] == "{{ messages[0].content }}"


NOT_COMPUTED = (
    {"general.architecture": "gemma2"},
    {"llama.expert_count": 8, "llama.expert_used_count": 2, "llama.expert_weights_scale": 2.0},
    {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0},
    {"llama.attention.sliding_window": 16},
    {"tokenizer.ggml.pre": "an unknown one"},
    {"tokenizer.ggml.model": "bert"},
    {"tokenizer.ggml.add_eos_token": True},
    {"llama.attention.value_length": 16},
)
#: Vocabularies that disagree.
WRONG = (
    {"tokenizer.ggml.tokens": ["a", "b", "c", "d"], "tokenizer.ggml.token_type": [1] * 4},
    {"tokenizer.ggml.tokens": ["a"] * 211},
    {"tokenizer.ggml.token_type": [1] * 4},
    {"tokenizer.ggml.eos_token_id": 999},
    {"tokenizer.ggml.merges": ["a nothing"]},
    {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0] * 4},
    {"llama.vocab_size": 300},
)


@pytest.mark.parametrize("more", [*NOT_COMPUTED, *WRONG])
def test_what_is_wrong_or_not_computed_is_refused(original, tmp_path, more):
    with pytest.raises(UnsupportedModelError if more in NOT_COMPUTED else ModelError):
        _ = Checkpoint.open(converted(original, tmp_path / "m.gguf", "f16", **more)).tokenizer


@pytest.mark.parametrize(
    ("key", "value"), [("llama.attention.head_count_kv", 3), ("tokenizer.ggml.merges", None)], ids=str
)
def test_what_the_metadata_gets_wrong_names_the_file_that_has_it(original, tmp_path, key, value):
    path = converted(original, tmp_path / "m.gguf", "f16", **{key: value})
    with pytest.raises(ModelError) as error:
        _ = Checkpoint.open(path).tokenizer
    assert str(error.value).startswith(str(path))
    assert value is not None or key in str(error.value)


@pytest.mark.parametrize("cases", [100, pytest.param(1000, marks=pytest.mark.nightly)])
def test_a_file_of_another_size_or_content_is_refused(original, tmp_path, cases):
    """Cut anywhere, or with any of its bytes changed, it is read or refused; nothing of a claimed size is made."""
    path = converted(original, tmp_path / "m.gguf", "q8_0")
    whole = path.read_bytes()
    for size in (0, 3, 4, 20, 100, 1000, 3000, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError):
            Checkpoint.open(path)
    rng = random.Random(3)
    for _ in range(cases):
        data, at = bytearray(whole), rng.randrange(8000)  # metadata and the list of tensors
        data[at : at + 8] = rng.choice([b"\xff" * 8, rng.randbytes(8), b"\0" * 8])
        path.write_bytes(data)
        with contextlib.suppress(ModelError):
            Checkpoint.open(path).close()


def test_a_quantisation_that_is_not_read_is_named(original, tmp_path):
    path = converted(original, tmp_path / "m.gguf", "q8_0")
    name, data = b"blk.0.attn_q.weight", bytearray(path.read_bytes())
    kind = data.index(name) + len(name) + 4 + 16
    assert data[kind] == 8
    data[kind] = 16
    path.write_bytes(data)
    with pytest.raises(UnsupportedModelError):
        Checkpoint.open(path)


BLOCKS = np.load(GOLDEN / "gguf-blocks.npz")


@pytest.mark.parametrize("name", [name for name in BLOCKS.files if " " not in name])
def test_blocks_are_decoded_as_by_the_formats_own_library(name):
    """Widened to another storage they have the same values, but for what is rounded."""
    storage, raw, want = STORAGES[name], BLOCKS[name], BLOCKS[f"{name} values"]
    np.testing.assert_array_equal(storage.decode(raw), want)
    if storage.wider:
        widened = STORAGES[storage.wider].rows(storage.widened(raw))
        rounded = {"q2_k": 4e-3, "iq4_xs": 5e-4}.get(name, 0)
        np.testing.assert_allclose(widened, want, rtol=0, atol=rounded * np.abs(want).max())


@pytest.mark.parametrize(
    "case", json.loads((GOLDEN / "pieces.json").read_text()), ids=["a space in front", "none", "of users"]
)
def test_texts_become_the_pieces_of_sentencepiece(case):
    metadata = {f"tokenizer.ggml.{key}": value for key, value in case["metadata"].items()}
    metadata["tokenizer.ggml.model"] = "llama"
    data, _ = tokenizer_files(Path("m.gguf"), metadata)
    tokenizer = Tokenizer.from_str(json.dumps(data))
    for text, ids in case["ids"].items():
        assert tokenizer.encode(text).ids == [1, *ids], "behind BOS"
        assert tokenizer.decode(ids) == text
    # Newer files have spaces in pieces of users in place of their mark.
    kinds = case["metadata"]["token_type"]
    spaced = [t.replace("\u2581", " ") if k == 4 else t for t, k in zip(case["metadata"]["tokens"], kinds, strict=True)]
    assert tokenizer_files(Path("m.gguf"), {**metadata, "tokenizer.ggml.tokens": spaced})[0] == data
    users = {"tokenizer.ggml.token_type": [4] * len(kinds), "tokenizer.ggml.add_space_prefix": True}
    with pytest.raises(UnsupportedModelError):
        tokenizer_files(Path("m.gguf"), {**metadata, **users})


def test_messages_become_ids_by_the_files_own_template(original, tmp_path):
    template = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}</s>"
    path = converted(original, tmp_path / "m.gguf", "q8_0", **{"tokenizer.chat_template": template})
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 40, "chat_template": "another"}')
    with Checkpoint.open(path) as model:
        assert model.chat is not None
        words = [i for text in ("ab", "</s>") for i in model.tokenizer.encode(text).ids]
        assert model.chat.ids([{"role": "user", "content": "ab</s>"}], None) == [2, *words, 3]
        assert model.spec.max_tokens == 40


def test_a_header_or_a_config_alone_describes_a_model(original, tmp_path):
    whole = converted(original, tmp_path / "whole.gguf", "q4_0", table="q8_0")
    with Checkpoint.open(whole) as model:
        spec = model.spec
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole.read_bytes()[: -(whole.stat().st_size // 4)])
    with pytest.raises(ModelError):
        Checkpoint.open(cut)
    assert described_spec(cut) == described_spec(whole) == spec
    directory = tmp_path / "config"
    with pytest.raises(ModelError):
        described_spec(directory)
    directory.mkdir()
    (directory / "config.json").write_text((original / "config.json").read_text())
    assert described_spec(directory) == replace(spec, storages=())
