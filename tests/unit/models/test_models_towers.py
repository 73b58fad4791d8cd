"""Checkpoints of two towers: what their files may say, and what they may lack."""

import json

import pytest
from safetensors.numpy import load_file, save_file

from hepti_mqtt.checkpoint import KINDS, Checkpoint, make_model, model_parts
from hepti_mqtt.core.errors import ModelError
from hepti_mqtt.models import models_of, spec_from_config


def specs(kind, text=None, image=None, **more):
    """Return the specs of a kind's towers with other keys in a section, or in the whole file."""
    made = KINDS[kind]
    config = json.loads(json.dumps(dict(made.config)))
    config["text_config"] |= text or {}
    config["vision_config"] |= image or {}
    return [spec_from_config(one, made.extras) for one in models_of({**config, **more}).values()]


def test_sections_are_read_as_transformers_does():
    words, pictures = specs("tiny-clip")
    assert (words.text.end, words.block.causal, words.head.outputs, pictures.head.outputs) == (3, True, 24, 24)
    assert specs("tiny-clip", {"eos_token_id": 2})[0].text.end == words.text.vocab  # the highest id, as in old files
    assert specs("tiny-clip", projection_dim=8)[1].head.outputs == 8
    # A second section is complete: what it leaves out is the class's default.
    assert specs("tiny-clip", text_config_dict={"hidden_size": 64})[0].text.vocab == 49408
    assert specs("tiny-clip", text_config_dict=None)[0] == words
    assert specs("tiny-siglip", text_config_dict={"hidden_size": 64})[0] == specs("tiny-siglip")[0]
    assert specs("tiny-siglip", {"projection_size": 20})[0].head.outputs == 20


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("tiny-clip", {"text": {"eos_token_id": [3, 4]}}),
        ("tiny-clip", {"text": {"eos_token_id": 211}}),
        ("tiny-clip", {"text": {"hidden_act": "gelu_10"}}),
        ("tiny-clip", {"text": {"num_attention_heads": 5}}),
        ("tiny-clip", {"image": {"patch_size": 7}}),
        ("tiny-clip", {"image": {"image_size": 25}}),
        ("tiny-clip", {"image": {"num_channels": 4}}),
        ("tiny-clip", {"vision_config": [1]}),
        ("tiny-clip", {"auto_map": {"AutoModel": "modeling.Clip"}}),
        ("tiny-clip", {"quantization_config": {"bits": 4}}),
        ("tiny-siglip", {"image": {"vision_use_head": False}}),
        ("tiny-siglip", {"text": {"vocab_size": "many"}}),
    ],
)
def test_what_is_not_computed_is_refused(kind, changes):
    with pytest.raises(ModelError):
        specs(kind, **changes)


@pytest.mark.parametrize(
    "lost", ["vision_model.", "text_model.", "visual_projection", "text_projection", "logit_scale"]
)
def test_a_tower_that_the_weights_lack(tmp_path, lost):
    path = make_model("tiny-clip", tmp_path / "m")
    kept = {name: values for name, values in load_file(path / "model.safetensors").items() if not name.startswith(lost)}
    save_file(kept, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError):  # noqa: PT012 - any of the two
        for part in model_parts(path):
            with Checkpoint.open(path, "m", part) as checkpoint:
                assert checkpoint.similarity
