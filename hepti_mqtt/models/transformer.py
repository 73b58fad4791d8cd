"""The spec of a transformer, and the layers that families share, as graphs; `plain.py` has the same layers in NumPy.

m tokens, h hidden, a heads of d columns, f MLP width, E experts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple, TypeVar, get_args

from hepti_mqtt.core.plan import CacheDtype
from hepti_mqtt.core.program import WeightRef
from hepti_mqtt.core.spec import CANDIDATES, Activation, InputSpec, RequestShape, TaskHead
from hepti_mqtt.core.storage import BLOCK_STORAGES, BlockStorage
from hepti_mqtt.lowering import roles
from hepti_mqtt.lowering.graph import GraphBuilder
from hepti_mqtt.lowering.ops import Norm
from hepti_mqtt.models.shapes import DecoderInput, ImageInput, PackedBatch, TextInput, TokenBatch


@dataclass(frozen=True, slots=True)
class TextStem:
    """Token embeddings: the sum of a token's, its position's and its type's rows, then a layer norm.

    A model without a table of positions or types, or without the norm, leaves it out.
    """

    #: Rows of the table of tokens.
    vocab: int
    #: Rows of the table of positions; without this table, the longest text.
    positions: int
    #: Rows of the table of token types, 0 without this table. A token of type t has the id: id + t x vocab.
    types: int
    #: Row of the table of positions for a text's first token.
    position_offset: int = 0
    #: Columns of the tables if a dense layer to h columns follows; 0: they have h columns.
    width: int = 0
    #: Factor of token rows.
    scale: float = 1.0
    #: Token whose first row is the embedding of a text (CLIP); `vocab`: the row of the text's highest id. None: no such
    #: token.
    end: int | None = None
    #: Texts are padded to the longest, and the model attends to the padding (SigLIP).
    padded: bool = False


T = TypeVar("T")
#: Tables of DeBERTa's layers, [buckets, a d] each.
DISENTANGLED: Final = ("position_keys", "position_queries")
MATRICES: Final = ("qkv", "attention_out", "mlp_up", "mlp_down")


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """Deviations of a model's layers from the BERT block.

    `thetas`, `rope_divisors` and `windows` have an entry per layer; a tuple with fewer entries than layers repeats, and
    an empty one means that no layer has this feature.
    """

    #: Matrices with a bias: names of `MATRICES`, where `mlp_up` includes the gate; in mixtures
    #: also `router` and `experts`, in ModernBERT parts of the head.
    biases: tuple[str, ...] = MATRICES
    #: Norms have a bias.
    norm_bias: bool = True
    #: Norms do not subtract the mean (RMSNorm).
    rms: bool = False
    #: Added to the weights of norms.
    gamma_offset: float = 0.0
    #: Number of first layers without a norm before attention.
    bare: int = 0
    #: The results of attention and MLP are normed before they are added (Gemma 3).
    added_norms: bool = False
    #: The MLP's hidden columns are activation(gate) * up.
    gated: bool = False
    #: Heads of keys and values; 0: as many as those of queries.
    kv_heads: int = 0
    #: Columns of a head; 0: h / a.
    head_dim: int = 0
    #: Each head of queries and keys is normed.
    head_norms: bool = False
    #: All heads of queries are normed together, and those of keys.
    row_norms: bool = False
    #: Factor of attention scores; 0: 1 / sqrt(d).
    scale: float = 0.0
    #: A row attends to no later row.
    causal: bool = False
    #: Rows of the tables that add to scores by the distance of query and key; 0 without such tables.
    buckets: int = 0
    #: Distances from this one on share the last bucket.
    farthest: int = 0
    #: Side of the grid of patches if buckets are steps on it instead of distances; else 0.
    side: int = 0
    #: All layers share the tables of buckets.
    shared_bias: bool = True
    #: A bucket has a key and a query (`DISENTANGLED`) instead of a bias per head (DeBERTa).
    disentangled: bool = False
    #: Base of the rotary positions; 0: the layer has none.
    thetas: tuple[float, ...] = ()
    #: Largest distance of query and key in rows, -1 for any.
    windows: tuple[int, ...] = ()
    #: Divisors of the rotary frequencies [d / 2], empty if all are 1.
    rope_divisors: tuple[tuple[float, ...], ...] = ()
    #: Number of experts, each `ModelSpec.mlp` wide; 0: each layer has an MLP.
    experts: int = 0
    #: Experts that each row chooses.
    chosen: int = 0
    #: The weights of a row's chosen experts add up to 1.
    normed_experts: bool = True
    #: Largest gate column of an expert; up columns are clipped to +- this limit. 0: no limit.
    gate_limit: float = 0.0
    #: Added to up columns of experts.
    up_offset: float = 0.0
    #: Each head has a learnt logit that takes weight from all keys.
    sinks: bool = False
    #: Layers of a mixture that have an MLP instead of experts.
    dense_layers: tuple[int, ...] = ()
    #: Width of this MLP.
    dense_mlp: int = 0
    #: Rows of a picture, which attend to each other in a causal model; 0: they attend to earlier rows only.
    picture_rows: int = 0


@dataclass(frozen=True, slots=True)
class ImageStem:
    """Patch embeddings of square images; pixels arrive as uint8 [B, channels, size, size]."""

    #: Pixels of an image's side.
    size: int
    #: Pixels of a patch's side.
    patch: int
    channels: int
    #: Mean and standard deviation of each channel, by which pixels are normalised.
    mean: tuple[float, ...]
    std: tuple[float, ...]
    #: Pixels of the shorter side after resizing, before the centre crop; 0: the whole picture is resized to a square.
    shortest: int = 0
    #: The longer side is resized to `shortest` too.
    square: bool = False
    #: Rows between the class token and the patches (register tokens).
    registers: int = 0
    #: Patches along a side of the stored table of positions, if it is resized for this image size; else 0.
    grid: int = 0
    #: There is a table of positions.
    positions: bool = True
    #: There is a class token.
    classed: bool = True

    @property
    def side(self) -> int:
        """Return the number of patches along a side."""
        return self.size // self.patch

    @property
    def patches(self) -> int:
        """Return the number of patches of one image."""
        return self.side**2

    @property
    def prefix(self) -> int:
        """Return the number of rows before the patches."""
        return self.classed + self.registers

    @property
    def rows(self) -> int:
        """Return the number of rows of one image."""
        return self.prefix + self.patches


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The spec of a transformer: a stem for text or images, layers, and a task head."""

    #: Key of `models.FAMILIES`.
    family: str
    #: Name in config.json's `architectures`.
    architecture: str
    #: Numbers of layers, of hidden columns (h), of query heads (a), and of MLP columns (f; of an expert).
    layers: int
    hidden: int
    heads: int
    mlp: int
    #: Norms come before attention and MLP (ViT, Llama), else after the residual sums (BERT).
    norm_first: bool
    #: Of the MLP.
    activation: Activation
    #: Epsilon of all norms.
    norm_eps: float
    #: Tokens of the longest text, or rows of an image.
    max_tokens: int
    head: TaskHead
    #: One of the two stems is given.
    text: TextStem | None = None
    image: ImageStem | None = None
    block: BlockSpec = BlockSpec()
    #: (tensor, storage) of the matrices in blocks, as stored or as quantised; `*` in a name is any layer or expert.
    storages: tuple[tuple[str, BlockStorage], ...] = ()
    #: Dtype of a session's keys and values.
    cache: CacheDtype = "f32"

    def storage_of(self, name: str) -> BlockStorage | None:
        """Return the storage of a matrix in blocks, None for other tensors."""
        storages = dict(self.storages)
        storage = storages.get(name)
        return storage if storage is not None else storages.get(any_layer(name))

    @property
    def head_dim(self) -> int:
        """Return d, the number of columns of one attention head."""
        return self.block.head_dim or self.hidden // self.heads

    @property
    def kv_heads(self) -> int:
        """Return the number of heads of keys and values."""
        return self.block.kv_heads or self.heads

    @property
    def norm(self) -> Norm:
        """Return the norm of all layers."""
        return Norm(self.norm_eps, self.block.rms, self.block.gamma_offset)

    @property
    def input_spec(self) -> InputSpec:
        """Return the description of a request's input: token ids, or pictures."""
        if self.text is not None and self.head.task == "generation":
            return DecoderInput(
                self.text.vocab, self.max_tokens, width=self.hidden, picture_rows=self.block.picture_rows
            )
        if self.text is not None:
            stem, masks = self.text, self.head.pooling == "mask"
            types = max(stem.types, 1)
            return TextInput(stem.vocab, self.max_tokens, masks, types, stem.end, stem.padded)
        assert self.image is not None
        image = self.image
        return ImageInput(image.size, image.channels, image.rows, image.shortest, image.square)

    def output_shape(self, shape: RequestShape) -> tuple[int, int]:
        """Return the shape of the answer: [m, h] hidden, [B or rows, outputs] logits, [rows, 2 K + 3] candidates,
        or [B, h] embeddings."""
        if shape.want == "hidden":
            return shape.size, self.hidden
        if self.head.square:
            return shape.size // self.head.square**2, self.head.outputs
        columns = 2 * candidate_count(self) + 3 if shape.want == "candidates" else self.head.columns(self.hidden)
        masks = len(shape.mask_positions)  # a run of a generation without masks answers for its last row
        counts = {"mask": masks, "none": shape.size, "last": masks or len(shape.sizes)}
        return counts.get(self.head.pooling, len(shape.sizes)), columns

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for msgpack or JSON; `from_dict` is the inverse."""
        return {**asdict(self), "head": self.head.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelSpec:
        """Return the spec that `to_dict` described; raises KeyError, TypeError or ValueError on other data."""
        fields = dict(data)
        fields["head"] = TaskHead.from_dict(fields["head"])
        if fields.get("text") is not None:
            fields["text"] = TextStem(**fields["text"])
        if fields.get("image") is not None:
            image = dict(fields["image"])
            fields["image"] = ImageStem(**{**image, "mean": tuple(image["mean"]), "std": tuple(image["std"])})
        plain: Mapping[str, Any] = fields.get("block", {})
        block: dict[str, Any] = {k: _frozen(v) for k, v in plain.items()}
        fields["block"] = BlockSpec(**block)
        fields["storages"] = tuple((str(name), _block_storage(of)) for name, of in fields.get("storages", ()))
        if fields.get("cache", "f32") not in get_args(CacheDtype):
            raise ValueError(f"keys and values in {fields['cache']!r}")
        spec = cls(**fields)
        if spec.text is not None and spec.max_tokens + spec.text.position_offset > spec.text.positions:
            raise ValueError(f"{spec.max_tokens} tokens do not fit into a table of {spec.text.positions} positions")
        return spec


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def any_layer(name: str) -> str:
    """Return a tensor's name with `*` in place of the numbers of its layer and its expert."""
    return re.sub(r"^layers\.[0-9]+\.", "layers.*.", re.sub(r"\.experts\.[0-9]+\.", ".experts.*.", name))


def _block_storage(name: Any) -> BlockStorage:
    if name not in BLOCK_STORAGES:
        raise ValueError(f"matrices in {name!r}")
    return name  # type: ignore[no-any-return]


def needed_rows(spec: ModelSpec, shape: PackedBatch) -> tuple[int, ...] | None:
    """Return the packed rows of the final hidden states that the task reads; None means all of them."""
    pooling = spec.head.pooling
    if shape.want == "hidden" or pooling not in ("cls", "last", "mask"):
        return None
    if pooling == "cls":
        return shape.starts
    if pooling == "last" and not shape.mask_rows:
        return tuple(start + length - 1 for start, length in zip(shape.starts, shape.lengths, strict=True))
    return shape.mask_rows


def sees_picture(spec: ModelSpec, shape: PackedBatch) -> bool:
    """Return whether a run consists of one picture, and its rows attend to each other."""
    return spec.block.picture_rows > 0 and isinstance(shape, TokenBatch) and shape.added


def candidate_count(spec: ModelSpec) -> int:
    """Return how many likeliest next tokens a run's answer has if candidates are wanted."""
    return min(CANDIDATES, spec.head.outputs)


def patch_rows(spec: ModelSpec, shape: PackedBatch) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the packed rows of all patches, and the number of patches of each picture."""
    assert spec.image is not None
    first = spec.image.prefix
    items = list(zip(shape.starts, shape.lengths, strict=True))
    rows = tuple(row for start, length in items for row in range(start + first, start + length))
    return rows, tuple(length - first for length in shape.lengths)


# ----------------------------------------------------------------------------------------------------------------------
# Layers that several families share, as graphs.
#
# Stored tensors of layer i are named `layers.<i>.NAME`, tensors of the graph `<i>.NAME`.


class Layer(NamedTuple):
    """A layer in the graph of a request: its sizes, its deviations from BERT, and the packed sequences."""

    hidden: int
    heads: int
    mlp: int
    activation: Activation
    #: A number is the epsilon of a layer norm.
    norm: Norm | float
    #: Rows of each packed sequence.
    lengths: tuple[int, ...]
    #: Columns of a head; 0: h / a.
    head_dim: int = 0
    #: Query heads that share a head of keys and values.
    group: int = 1
    block: BlockSpec = BlockSpec()
    #: This layer's entries of `BlockSpec.thetas`, `windows` and `rope_divisors`.
    theta: float = 0.0
    window: int = -1
    divisors: tuple[float, ...] = ()
    #: There is no norm before its attention.
    bare: bool = False
    #: Tables of buckets (see `BlockSpec.buckets`).
    bias: tuple[WeightRef, ...] = ()
    #: Rows of each session's KV cache, 0 without sessions.
    cache: int = 0
    #: Tensor with the number of rows that each cache has already; empty without sessions.
    at: str = ""
    #: Dtype of the cache.
    kept: CacheDtype = "f32"
    #: Number of experts, 0 for an MLP.
    experts: int = 0
    #: All rows of a session's run attend to each other.
    together: bool = False
    #: one stored matrix gives queries, keys and values
    joined: bool = False

    @classmethod
    def of(cls, spec: ModelSpec, shape: PackedBatch, i: int = 0, bias: tuple[WeightRef, ...] = ()) -> Layer:
        """Return layer i of a model in a request without a session."""
        block = spec.block
        is_dense = i in block.dense_layers
        mlp = block.dense_mlp if is_dense else spec.mlp
        return cls(
            spec.hidden, spec.heads, mlp, spec.activation, spec.norm, shape.lengths, spec.head_dim,
            spec.heads // spec.kv_heads, block, _of_layer(block.thetas, i, 0.0), _of_layer(block.windows, i, -1),
            _of_layer(block.rope_divisors, i, ()), i < block.bare, bias,
            experts=0 if is_dense else block.experts,
        )  # fmt: skip


def _of_layer(values: tuple[T, ...], i: int, without: T) -> T:
    return values[i % len(values)] if values else without


LAYERS: Final = "layers.{}."


def add_layers(
    net: GraphBuilder,
    spec: ModelSpec,
    shape: PackedBatch,
    x: str,
    refs: Mapping[str, WeightRef],
    at: str = "",
    stored: str = LAYERS,
) -> str:
    """Add all layers of a model: x [m, h] -> [m, h].

    at: see `Layer`. stored: prefix of a layer's stored tensors, with `{}` for the layer's index.
    """
    layer = pre_norm if spec.norm_first else post_norm
    for i in net.layers(spec.layers):
        if not spec.norm_first:
            net.begin_block()
        here = "" if spec.block.shared_bias else f"layers.{i}."
        names = DISENTANGLED if spec.block.disentangled else ("relative_bias",)
        bias = tuple(refs[f"{here}{name}"] for name in names) if spec.block.buckets else ()
        n = Layer.of(spec, shape, i, bias)._replace(cache=shape.session_rows, at=at, kept=spec.cache)
        own = stored.format(i)
        n = n._replace(together=bool(at) and sees_picture(spec, shape), joined=f"{own}qkv.weight" in refs)
        x = layer(net, f"{i}.", own, x, n)  # [m, h]
    net.begin_block()
    return x


def post_norm(net: GraphBuilder, name: str, stored: str, x: str, n: Layer) -> str:
    """Add a layer that norms after each residual (BERT): x [m, h] -> [m, h]."""
    attention = _attention(net, name, stored, x, n)  # [m, h]
    total = net.sum(f"{name}r", x, attention, roles.ATTENTION_SUM)
    y = _norm(net, f"{name}y", total, roles.AFTER_ATTENTION, f"{stored}attention_norm", n)
    total = net.sum(f"{name}s", y, _mlp(net, name, stored, y, n), roles.MLP_SUM)
    return _norm(net, f"{name}x", total, roles.AFTER_MLP, f"{stored}mlp_norm", n)


def pre_norm(net: GraphBuilder, name: str, stored: str, x: str, n: Layer) -> str:
    """Add a layer that norms before each block (ViT): x [m, h] -> [m, h].

    A block of the graph begins after its first norm; one kernel computes the norm with the residual sum before it.
    """
    u = x if n.bare else _norm(net, f"{name}u", x, roles.BEFORE_ATTENTION, f"{stored}attention_norm", n)
    net.begin_block()
    added = _attention(net, name, stored, u, n)  # [m, h]
    if n.block.added_norms:
        added = _norm(net, f"{name}r", added, roles.ATTENTION_SUM, f"{stored}attention_out_norm", n)
    y = net.sum(f"{name}y", x, added, roles.AFTER_ATTENTION)
    v = _norm(net, f"{name}v", y, roles.BEFORE_MLP, f"{stored}mlp_norm", n)
    added = _mlp(net, name, stored, v, n)  # [m, h]
    if n.block.added_norms:
        added = _norm(net, f"{name}s", added, roles.MLP_SUM, f"{stored}mlp_down_norm", n)
    return net.sum(f"{name}x", y, added, roles.AFTER_MLP)


def _norm(net: GraphBuilder, name: str, x: str, role: str, stored: str, n: Layer) -> str:
    return net.norm(name, x, role, stored, n.norm, n.block.norm_bias)


def _attention(net: GraphBuilder, name: str, stored: str, x: str, n: Layer) -> str:
    width, block = net.shape_of(x)[1], n.block
    d = n.head_dim or n.hidden // n.heads
    q = n.heads * d
    kv = q // n.group
    matrices = {f"{stored}query": q, f"{stored}key": kv, f"{stored}value": kv}
    matrices = {f"{stored}qkv": q + 2 * kv} if n.joined else matrices
    bias = "qkv" in block.biases
    if block.row_norms:
        projected = _normed_rows(net, name, x, n, matrices)  # [m, q + 2 kv]
    elif n.theta:
        projected = net.linear(f"{name}projection", x, roles.PROJECTION, matrices, bias=bias)  # [m, q + 2 kv]
    if n.theta:
        gammas = (f"{stored}query_norm.weight", f"{stored}key_norm.weight") if block.head_norms else ()
        qkv = net.rotate(
            f"{name}qkv", projected, roles.QKV, d=d, columns=(q, kv), theta=n.theta,
            lengths=n.lengths, places=n.cache if n.at else 0,
            norm=n.norm if block.head_norms and isinstance(n.norm, Norm) else None, gammas=gammas, at=n.at,
            divisors=n.divisors,
        )  # fmt: skip
    else:
        qkv = net.linear(f"{name}qkv", x, roles.QKV, matrices, bias=bias)  # [m, q + 2 kv]
    attention = _attend(net, name, stored, qkv, n, q, kv)  # [m, q]
    out = {f"{stored}attention_out": width}
    return net.linear(f"{name}o", attention, roles.ATTENTION_OUT, out, bias="attention_out" in block.biases)


def _normed_rows(net: GraphBuilder, name: str, x: str, n: Layer, matrices: Mapping[str, int]) -> str:
    """Add queries and keys, each normed over all heads, and values: x [m, h] -> [m, q + 2 kv].

    A norm needs whole rows, so every device computes all queries and keys.
    """
    bias, parts = "qkv" in n.block.biases, list[str]()
    for part, (matrix, width) in zip(("query", "key", "value"), matrices.items(), strict=True):
        rows = net.linear(f"{name}{part}", x, roles.PROJECTION, {matrix: width}, bias=bias)
        is_normed = part != "value"
        parts.append(_norm(net, f"{name}{part}n", rows, roles.PROJECTION, f"{matrix}_norm", n) if is_normed else rows)
    return net.join(f"{name}projection", parts, roles.PROJECTION)


def _attend(net: GraphBuilder, name: str, stored: str, qkv: str, n: Layer, q: int, kv: int) -> str:
    block, unit = n.block, net.block_of(f"{stored}attention_out.weight")
    if n.at:
        caches = net.append_to_cache(
            f"{name}kv", f"{stored}kv", qkv, n.at, rows=n.cache, start=q, lengths=n.lengths, kept=n.kept
        )  # [C, 2 kv] each
        return net.cached_attention(
            f"{name}attention", qkv, caches, n.at, heads=n.heads, columns=(0, 0, kv), group=n.group, scale=block.scale,
            lengths=n.lengths, window=n.window, unit=unit, together=n.together,
            sinks=f"{stored}sinks" if block.sinks else "",
        )  # fmt: skip
    return net.attention(
        f"{name}attention", qkv, qkv, roles.ATTENTION, heads=n.heads, width=q, columns=(0, q, q + kv),
        lengths=n.lengths, causal=block.causal, window=n.window, group=n.group, scale=block.scale, bias=n.bias,
        farthest=block.farthest, side=block.side, unit=unit,
    )  # fmt: skip


def expert_names(stored: str, experts: int, *parts: str) -> tuple[str, ...]:
    """Return the names of the matrices of all experts of a layer: all of the first part, then all of the next."""
    return tuple(f"{stored}experts.{e}.{part}" for part in parts for e in range(experts))


def _mlp(net: GraphBuilder, name: str, stored: str, x: str, n: Layer) -> str:
    if n.experts:
        count, top, width = n.experts, n.block.chosen, net.shape_of(x)[1]
        logits = net.linear(
            f"{name}router", x, roles.ROUTER, {f"{stored}router": count}, bias="router" in n.block.biases
        )  # [m, E]
        biases = {part: f"{stored}experts.{part}.bias" for part in ("gate", "up", "down")}
        biases = biases if "experts" in n.block.biases else {}
        hidden = net.experts_up(
            f"{name}up", x, logits, roles.MLP_UP, expert_names(stored, count, "gate", "up"), n.mlp, top, n.activation,
            biases=[*biases.values()][:2], limit=n.block.gate_limit, offset=n.block.up_offset,
        )  # fmt: skip
        return net.experts_down(
            f"{name}down", hidden, logits, roles.MLP_DOWN, expert_names(stored, count, "down"), width, top,
            n.block.normed_experts, biases=[*biases.values()][2:],
        )  # fmt: skip
    bias = "mlp_up" in n.block.biases
    up = net.linear(f"{name}up", x, roles.MLP_UP, {f"{stored}mlp_up": n.mlp}, bias=bias)  # [m, f]
    if n.block.gated:
        gate = net.linear(f"{name}gate", x, roles.MLP_UP, {f"{stored}mlp_gate": n.mlp}, bias=bias)  # [m, f]
        hidden = net.gate(f"{name}g", gate, up, roles.MLP_HIDDEN, n.activation)
    else:
        hidden = net.activation(f"{name}g", up, roles.MLP_HIDDEN, n.activation)
    down = {f"{stored}mlp_down": net.shape_of(x)[1]}
    return net.linear(f"{name}down", hidden, roles.MLP_DOWN, down, bias="mlp_down" in n.block.biases)
