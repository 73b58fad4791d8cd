"""A decoder of text after an encoder: norms before blocks, attention to its own text, then to the encoder's states.

m new tokens, C rows of the cache of the text, S states, h hidden, f MLP width, V tokens in the vocabulary. A session
keeps the keys and values of the text, and of the states from its first run. All tensors except the logits have the role
TASK.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from hepti_mqtt.core.program import WeightRef
from hepti_mqtt.lowering import roles
from hepti_mqtt.lowering.graph import GraphBuilder
from hepti_mqtt.models import plain
from hepti_mqtt.models.speech import SpeechRun, SpeechSpec, answered

EPS: Final = 1e-5


def stored(spec: SpeechSpec, i: int) -> str:
    """Return the prefix of a decoder layer's tensors; decoder layers follow the encoder's."""
    return f"layers.{spec.layers + i}."


def graph(
    net: GraphBuilder,
    spec: SpeechSpec,
    shape: SpeechRun,
    at: str,
    ids: str,
    states: str | None,
    refs: Mapping[str, WeightRef],
    extent: str = "",
) -> None:
    """Add the decoder: ids [m] after `at` earlier ones, in the first run the states [S, h] -> logits [1 or 2, V].

    extent: of the tokens that are aligned with the sound -> [m, 1] instead of logits, see `kernels.alignment`.
    """
    h, heads, task = spec.hidden, spec.heads, roles.TASK
    aligning = {layer: list[str]() for layer, _ in sorted(spec.alignment)} if extent else {}
    tables = [refs["stem.word"], refs["stem.position"]]
    x = net.embedding("embedded", (ids, at), "embed_at", tables, h)  # [m, h]
    for i in range(spec.decoder_layers):
        here, name = stored(spec, i), f"d{i}."
        u = net.norm(f"{name}u", x, task, f"{here}attention_norm", EPS)  # [m, h]
        net.begin_block()
        qkv = net.linear(f"{name}qkv", u, task, {f"{here}{part}": h for part in ("query", "key", "value")})  # [m, 3h]
        kv = net.append_to_cache(f"{name}kv", f"{here}kv", qkv, at, rows=shape.positions, start=h, role=task)  # [C, 2h]
        attended = net.cached_attention(f"{name}attention", qkv, kv, at, heads=heads, columns=(0, 0, h), role=task)
        out = net.linear(f"{name}o", attended, task, {f"{here}attention_out": h})  # [m, h]
        y = net.sum(f"{name}y", x, out, task)  # [m, h]
        w = net.norm(f"{name}w", y, task, f"{here}cross_norm", EPS)  # [m, h]
        q = net.linear(f"{name}q", w, task, {f"{here}cross_query": h})  # [m, h]
        kept = f"{here}cross"  # in the session
        if states is None:
            pair = net.session_state(f"{name}cross", kept, rows=shape.rows, width=2 * h, role=task)  # [S, 2h]
        else:
            pair = net.linear(f"{name}pair", states, task, {f"{here}cross_key": h, f"{here}cross_value": h})  # [S, 2h]
            (pair,) = net.append_to_cache(
                f"{name}cross", kept, pair, at, rows=shape.rows, start=0, role=task
            )  # [S, 2h]
        if i in aligning:
            aligning[i] += [q, pair]
            if i == max(aligning):
                _align(net, spec, shape, aligning, extent)
                return
        heard = net.attention(
            f"{name}heard", q, pair, task, heads=heads, width=h, columns=(0, 0, h), lengths=(shape.rows,)
        )  # [m, h]
        out = net.linear(f"{name}p", heard, task, {f"{here}cross_out": h})  # [m, h]
        z = net.sum(f"{name}z", y, out, task)  # [m, h]
        v = net.norm(f"{name}v", z, task, f"{here}mlp_norm", EPS)  # [m, h]
        up = net.linear(f"{name}up", v, task, {f"{here}mlp_up": spec.mlp})  # [m, f]
        hidden = net.activation(f"{name}g", up, task, spec.activation)  # [m, f]
        x = net.sum(f"{name}x", z, net.linear(f"{name}down", hidden, task, {f"{here}mlp_down": h}), task)  # [m, h]
    net.begin_block()
    x = net.rows("asked", x, task, answered(shape))
    x = net.norm("decoder.norm", x, task, "decoder.norm", EPS)
    net.linear("logits", x, roles.LOGITS, {"head.decoder": spec.head.outputs}, bias=False)  # [1 or 2, V]


def _align(net: GraphBuilder, spec: SpeechSpec, shape: SpeechRun, of: Mapping[int, list[str]], extent: str) -> None:
    """Add the row of sound at which each token begins [m, 1]; of: queries [m, h] and keys [S, 2h] of layers."""
    places = {layer: place for place, layer in enumerate(of)}
    heads = tuple((places[layer], head) for layer, head in spec.alignment)
    xs = (*(x for pair in of.values() for x in pair), extent)
    net.begin_block()
    net.opaque(
        "alignment", xs, roles.TASK, "align_tokens", (shape.tokens, 1), heads=heads, head_dim=spec.hidden // spec.heads
    )


def reference(
    spec: SpeechSpec, t: plain.Tensors, ids: plain.Array, states: plain.Array, places: tuple[int, ...]
) -> plain.Array:
    """Return the logits at `places` of a first run from all ids [m] and the states [S, h], in plain NumPy."""
    m = len(ids)
    x = t["stem.word"][ids] + t["stem.position"][:m]  # [m, h]
    for i in range(spec.decoder_layers):
        here = stored(spec, i)
        u = plain.norm(t, f"{here}attention_norm", x, EPS)
        q, k, v = (plain.linear(t, f"{here}{part}", u) for part in ("query", "key", "value"))
        x = x + plain.linear(t, f"{here}attention_out", plain.attention(q, k, v, spec.heads, (m,), causal=True))
        q = plain.linear(t, f"{here}cross_query", plain.norm(t, f"{here}cross_norm", x, EPS))
        k, v = (plain.linear(t, f"{here}{part}", states) for part in ("cross_key", "cross_value"))
        x = x + plain.linear(t, f"{here}cross_out", plain.attention_over(q, k, v, spec.heads))
        up = plain.linear(t, f"{here}mlp_up", plain.norm(t, f"{here}mlp_norm", x, EPS))
        x = x + plain.linear(t, f"{here}mlp_down", plain.activate(spec.activation, up))
    x = plain.norm(t, "decoder.norm", x[list(places)], EPS)
    return np.asarray(x @ t["head.decoder.weight"])
