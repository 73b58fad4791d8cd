"""The roles of tensors: families state them, and methods place tensors by them.

Arrows lead from a tensor's role to that of the next tensor. A layer with norms after the residual sums (BERT):

    x -> qkv -> attention -> attention_out -> attention_sum (+ x) -> after_attention (norm)
      -> mlp_up -> mlp_hidden (activation) -> mlp_down -> mlp_sum (+ after_attention) -> after_mlp (norm)

With norms before attention and MLP (ViT, GPT-2, Llama), before_attention and before_mlp are norms, after_attention and
after_mlp residual sums. If the addends are normed too (Gemma 3), attention_sum and mlp_sum are these norms. With rotary
positions, projection -> qkv. A gated MLP has two tensors mlp_up of equal size; experts have one: their hidden rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

INPUT: Final = "input"  # from the request
STEM: Final = "stem"  # before the layers
EMBEDDINGS: Final = "embeddings"  # rows of the token embeddings
FRAMES: Final = "frames"  # a stem in rows, computed where the layers need them
TASK: Final = "task"  # after the layers
LOGITS: Final = "words"  # logits of all tokens; JSON calls them words
CANDIDATES: Final = "candidates"  # the likeliest tokens

BEFORE_ATTENTION: Final = "before_attention"
PROJECTION: Final = "projection"  # queries, keys and values without rotary positions
QKV: Final = "qkv"
ATTENTION: Final = "attention"
ATTENTION_OUT: Final = "attention_out"
ATTENTION_SUM: Final = "attention_sum"
AFTER_ATTENTION: Final = "after_attention"
BEFORE_MLP: Final = "before_mlp"
ROUTER: Final = "router"  # logits of experts, computed on every device that needs them
MLP_UP: Final = "mlp_up"
MLP_HIDDEN: Final = "mlp_hidden"
MLP_DOWN: Final = "mlp_down"
MLP_SUM: Final = "mlp_sum"
AFTER_MLP: Final = "after_mlp"
MOMENTS: Final = "moments"  # of every norm of a layer
TASK_MOMENTS: Final = "task_moments"  # of a norm after the layers; no method places it, so one kernel does both

SLICE: Final = "slice"  # the part of a tensor that a branch of a layer reads
JOIN: Final = "join"  # concatenated branches

CACHE: Final = "cache"  # keys and values of earlier tokens, kept by sessions

MAP: Final = "map"  # a feature map of a convolutional net
MAP_SUM: Final = "map_sum"  # before its activation
SQUEEZE: Final = "squeeze"  # rows of channel means that scale maps
FLAT: Final = "flat"  # a feature map as one row
DENSE: Final = "dense"  # a fully connected layer

# Features of models, for people, by role.
_FEATURES: Final = {
    AFTER_MLP: "MLP",
    SLICE: "branches within a layer",
    JOIN: "branches within a layer",
    CACHE: "a cache of keys and values",
    MAP: "feature maps",
}
_FROM: Final = {SLICE: "a decoupled checkpoint, which is trained as such (one to try: hepti model make debert-base)"}


def describe(role: str) -> str:
    """Return the feature of a model that has tensors of a role, for people."""
    return _FEATURES.get(role, role.replace("_", " "))


def missing_role_hint(missing: Iterable[str]) -> str:
    """Return how to get a model with the missing roles, as the end of a sentence; empty without a hint."""
    return "".join(f"; it takes {_FROM[role]}" for role in missing if role in _FROM)
