"""What a tensor is in its family: the words by which methods place tensors, and families name them.

An encoder layer, post-norm (BERT):  x -> qkv -> attention -> attention_out -> + x = attention_sum -> norm =
after_attention -> mlp_up -> activation = mlp_hidden -> mlp_down -> + = mlp_sum -> norm = after_mlp.
Pre-norm (ViT, GPT-2): before_attention and before_mlp are norms, after_attention and after_mlp the residual sums; where
what a block adds is normed too (Gemma 3), attention_sum and mlp_sum are these norms. Rotary positions: projection ->
qkv. A gated MLP has two tensors mlp_up of equal size, and one of experts a single one: their hidden rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

INPUT: Final = "input"  # what the request brings
STEM: Final = "stem"  # before the layers
EMBEDDINGS: Final = "embeddings"  # rows of the table of words
FRAMES: Final = "frames"  # a stem in rows that are computed where the layers need them
TASK: Final = "task"  # behind the layers
WORDS: Final = "words"  # the logits of every word
CANDIDATES: Final = "candidates"  # the likeliest words

BEFORE_ATTENTION: Final = "before_attention"
PROJECTION: Final = "projection"  # queries, keys and values without rotary positions
QKV: Final = "qkv"
ATTENTION: Final = "attention"
ATTENTION_OUT: Final = "attention_out"
ATTENTION_SUM: Final = "attention_sum"
AFTER_ATTENTION: Final = "after_attention"
BEFORE_MLP: Final = "before_mlp"
ROUTER: Final = "router"  # logits of experts, which every device computes that needs them
MLP_UP: Final = "mlp_up"
MLP_HIDDEN: Final = "mlp_hidden"
MLP_DOWN: Final = "mlp_down"
MLP_SUM: Final = "mlp_sum"
AFTER_MLP: Final = "after_mlp"
MOMENTS: Final = "moments"  # of every norm of a layer
TASK_MOMENTS: Final = "task_moments"  # of a norm behind the layers; that no line places it lets both be one kernel

SLICE: Final = "slice"  # a part of a tensor, by which branches of a layer part
JOIN: Final = "join"  # branches side by side again

CACHE: Final = "cache"  # keys and values of earlier tokens, which sessions keep

MAP: Final = "map"  # a feature map of a convolutional net
MAP_SUM: Final = "map_sum"  # before its activation
SQUEEZE: Final = "squeeze"  # rows from a mean over a map, by which maps are scaled
FLAT: Final = "flat"  # a feature map as one row
DENSE: Final = "dense"  # a fully connected layer

_WORDS: Final = {
    AFTER_MLP: "MLP",
    SLICE: "branches within a layer",
    JOIN: "branches within a layer",
    CACHE: "a cache of keys and values",
    MAP: "feature maps",
}
_FROM: Final = {SLICE: "a decoupled checkpoint, which is trained as such (one to try: hepti model make debert-base)"}


def describe(role: str) -> str:
    """Return what a model has that has tensors of a role, for people."""
    return _WORDS.get(role, role.replace("_", " "))


def missing_role_hint(missing: Iterable[str]) -> str:
    """Return a hint on how to get a model with the missing roles, as the end of a sentence; empty without one."""
    return "".join(f"; it takes {_FROM[role]}" for role in missing if role in _FROM)
