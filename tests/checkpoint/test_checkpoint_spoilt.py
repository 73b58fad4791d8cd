"""Directories that are no model, or a damaged one: what the error says."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest
from checkpoint_support import rewrite, shard
from hypothesis import given, settings
from hypothesis import strategies as st

from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.errors import ModelError, UnsupportedModelError


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (shutil.rmtree, "is no directory"),
        (lambda p: (p / "config.json").unlink(), r"config\.json is missing"),
        (lambda p: (p / "config.json").write_text("{"), r"config\.json is not valid JSON"),
        (lambda p: (p / "config.json").write_bytes(b"\xff"), r"config\.json is not valid JSON"),
        (lambda p: (p / "config.json").write_text("[" * 100000), r"config\.json is not valid JSON"),
        (lambda p: (p / "config.json").write_text("[]"), "expected a JSON object"),
        (lambda p: (p / "modules.json").write_text("nonsense"), r"modules\.json is not valid JSON"),
        (lambda p: (p / "model.safetensors").unlink(), "save_pretrained"),
        (lambda p: truncate(p, 1000), "incomplete copy"),
        (lambda p: truncate(p, 10), "incomplete copy"),
        (lambda p: truncate(p, 0), "incomplete copy"),
        (lambda p: truncate(p, -1), "incomplete copy"),
        (lambda p: rewrite(p, lambda t: {"other": np.zeros(3, np.float32)}), r"word_embeddings.weight.*more"),
        (
            lambda p: rewrite(p, lambda t: drop(t, "encoder.layer.1.output.dense.bias")),
            "lacks bert.encoder.layer.1.out",
        ),
        (
            lambda p: rewrite(p, lambda t: {k: v[..., :16].copy() for k, v in t.items()}),
            r"\[211, 16\] instead of \[211, 32",
        ),
        (lambda p: rewrite(p, lambda t: {k: v.astype(np.int32) for k, v in t.items()}), "dtype I32"),
    ],
)
def test_spoilt_directories_say_what_is_wrong(bert, spoil, says):
    spoil(bert)
    with pytest.raises(ModelError, match=says):
        Checkpoint.open(bert)


def truncate(path, size):
    file = path / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:size])


def drop(tensors, part):
    return {k: v for k, v in tensors.items() if part not in k}


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda p: (p / "model-00002-of-00003.safetensors").unlink(), "model-00002-of-00003.safetensors, missing in"),
        (lambda p: (p / "model-00002-of-00003.safetensors").write_bytes(b"abc"), "incomplete copy"),
        (lambda p: (p / "model.safetensors.index.json").write_text("{}"), "weight_map"),
        (lambda p: (p / "model.safetensors.index.json").write_text("[]"), "weight_map"),
        (lambda p: (p / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x"}}'), "own directory"),
    ],
)
def test_spoilt_shards_say_what_is_wrong(bert, spoil, says):
    shard(bert)
    spoil(bert)
    with pytest.raises(ModelError, match=says):
        Checkpoint.open(bert)


@settings(deadline=None)
@given(st.data())
def test_every_truncation_of_the_weights_is_a_model_error(made, tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "truncated"
    if not path.exists():
        shutil.copytree(made["tiny-bert"], path)
    whole = (made["tiny-bert"] / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(ModelError, match="safetensors"):
        Checkpoint.open(path)


def test_an_unsupported_model_says_so_before_its_weights_are_looked_for(bert):
    (bert / "model.safetensors").unlink()
    (bert / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM"):
        Checkpoint.open(bert)


def test_files_are_closed_when_opening_fails(bert, made):
    rewrite(bert, lambda tensors: drop(tensors, "word"))
    before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    if before is None:
        pytest.skip("needs /proc")
    for _ in range(3):
        with pytest.raises(ModelError):
            Checkpoint.open(bert)
        Checkpoint.open(made["tiny-bert"]).close()
    assert len(os.listdir("/proc/self/fd")) <= len(before)


@pytest.mark.parametrize(
    ("written", "said", "words"),
    [
        ("tiny-debert", "tiny-bert", "another family than BertModel.*must name one of DecoupledBertModel"),
        ("tiny-bert", "tiny-debert", "another family than DecoupledBertModel.*must name one of .*BertModel"),
        ("tiny-devit", "tiny-vit", "another family than ViTModel.*DecoupledViTForImageClassification"),
    ],
)
def test_a_decoupled_checkpoint_and_an_ordinary_one_are_told_apart(tmp_path, written, said, words):
    path, other = make_model(written, tmp_path / "model"), make_model(said, tmp_path / "other")
    (path / "config.json").write_text((other / "config.json").read_text())
    with pytest.raises(ModelError, match=words):
        Checkpoint.open(path)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_parts", 5, "num_parts 5 does not divide hidden_size 32"),
        ("num_parts", 2, "config.json and the weights must be of the same model"),
        ("num_groups", 3, "num_groups 3 must divide num_hidden_layers 4"),
        ("num_groups", 4, "num_groups 4 must divide num_hidden_layers 4 and be less"),
        ("num_parts", None, "'num_parts' is missing"),
    ],
)
def test_a_decoupled_checkpoint_of_other_groups_and_parts_is_refused_with_the_limits(tmp_path, key, value, words):
    path = make_model("tiny-debert", tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(ModelError, match=words):
        Checkpoint.open(path)
