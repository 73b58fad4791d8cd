"""Encoders whose tokens see a window: what their files say, and what devices ask each other for."""

from sites import plan, request

from hepti_mqtt import models
from hepti_mqtt.checkpoint import KINDS
from hepti_mqtt.core.program import Recv
from hepti_mqtt.strategies.plan_programs import device_programs


def spec_of(kind, **changes):
    return models.spec_from_config({**KINDS[kind].config, **changes}, {})


def test_a_device_asks_for_no_keys_beyond_its_window():
    spec = spec_of("tiny-modernbert", max_position_embeddings=300, layer_types=["sliding_attention"] * 4)
    shape, _ = request(spec, (200,), "hidden")
    whole = spec_of("tiny-modernbert", max_position_embeddings=300, layer_types=["full_attention"] * 4)
    parts = [device_programs(s, plan(s, ("row", {"variant": "kv"}), (1.0,) * 4), shape)["d0"] for s in (spec, whole)]
    received = [sum(program.slots[op.slot].nbytes for op in program.ops if isinstance(op, Recv)) for program in parts]
    assert received[0] < received[1] / 4


def test_the_first_configuration_of_nomic_bert_is_read():
    old = {
        "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "activation_function": "swiglu",
        "auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"},
        "n_embd": 32, "n_head": 4, "n_inner": 48, "n_layer": 3, "n_positions": 40, "layer_norm_epsilon": 1e-12,
        "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "qkv_proj_bias": False,
        "rotary_scaling_factor": None, "type_vocab_size": 2, "vocab_size": 211, "prenorm": False, "causal": False,
    }  # fmt: skip
    assert models.spec_from_config(old, {}) == spec_of("tiny-nomic")
