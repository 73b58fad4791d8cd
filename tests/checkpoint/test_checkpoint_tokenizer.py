"""The tokenizer's files of a directory."""

from __future__ import annotations

import json

import pytest

from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.errors import ModelError


def test_padding_and_truncation_of_the_tokenizer_are_off(bert):
    data = json.loads((bert / "tokenizer.json").read_text())
    data["truncation"] = {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    data["padding"] = {
        "strategy": {"Fixed": 128},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "[PAD]",
    }
    (bert / "tokenizer.json").write_text(json.dumps(data))
    with Checkpoint.open(bert) as checkpoint:
        assert len(checkpoint.tokenizer.encode("the door is a light").ids) == 7


@pytest.mark.parametrize("text", ["{}", "", "[1]", '{"version": "1.0"}'])
def test_a_broken_tokenizer_is_a_model_error(bert, text):
    (bert / "tokenizer.json").write_text(text)
    with Checkpoint.open(bert) as checkpoint, pytest.raises(ModelError, match="not a valid tokenizer"):
        checkpoint.tokenizer.encode("a")


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
    with Checkpoint.open(bert) as checkpoint, pytest.raises(ModelError, match="no mask token"):
        assert checkpoint.mask_id
