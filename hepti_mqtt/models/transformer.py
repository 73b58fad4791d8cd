"""The spec of a transformer: what its families read off their config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from hepti_mqtt.lowering import GraphBuilder, roles
from hepti_mqtt.models.shapes import DecoderInput, ImageInput, PackedBatch, TextInput
from hepti_mqtt.spec import Activation, InputSpec, RequestShape, TaskHead


@dataclass(frozen=True, slots=True)
class TextStem:
    """Token embeddings: word + position + type, then a layer norm.

    types: 0 where there is no table of token types; with several, an id has its type x vocab added. width: columns of
    the tables where a dense layer takes them to h, 0 where they have h themselves.
    """

    vocab: int
    positions: int
    types: int
    position_offset: int = 0
    width: int = 0


@dataclass(frozen=True, slots=True)
class ImageStem:
    """Patch embeddings of square images; pixels arrive as uint8 [B, channels, size, size].

    shortest: of a picture's shorter side before its middle is taken; 0: all of it is made square.
    """

    size: int
    patch: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    shortest: int = 0

    @property
    def patches(self) -> int:
        """Return the number of patches of one image."""
        return (self.size // self.patch) ** 2


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The spec of a transformer: text or images in, layers that are alike, a task head."""

    family: str
    architecture: str
    layers: int
    hidden: int
    heads: int
    mlp: int
    norm_first: bool
    activation: Activation
    norm_eps: float
    max_tokens: int
    head: TaskHead
    text: TextStem | None = None
    image: ImageStem | None = None

    @property
    def head_dim(self) -> int:
        """Return d, the columns of one attention head."""
        return self.hidden // self.heads

    @property
    def input_spec(self) -> InputSpec:
        """Return what a request brings: token ids, or pictures."""
        if self.text is not None and self.head.task == "generation":
            return DecoderInput(self.text.vocab, self.max_tokens)
        if self.text is not None:
            return TextInput(self.text.vocab, self.max_tokens, self.head.pooling == "mask", max(self.text.types, 1))
        assert self.image is not None
        image = self.image
        return ImageInput(image.size, image.channels, image.patches + 1, image.shortest)

    def output_shape(self, shape: RequestShape) -> tuple[int, int]:
        """Return the shape of the answer: [m, h] hidden, [B or rows, outputs] logits, or [B, h] embeddings."""
        if shape.want == "hidden":
            return shape.size, self.hidden
        rows = {"mask": len(shape.mask_positions), "none": shape.size}.get(self.head.pooling, len(shape.sizes))
        return rows, self.head.columns(self.hidden)

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
        made = cls(**fields)
        if made.text is not None and made.max_tokens + made.text.position_offset > made.text.positions:
            raise ValueError(f"{made.max_tokens} tokens do not fit into a table of {made.text.positions} positions")
        return made


def needed_rows(spec: ModelSpec, shape: PackedBatch) -> tuple[int, ...] | None:
    """Return the packed rows of the final hidden states that the task reads; None means all of them."""
    pooling = spec.head.pooling
    if shape.want == "hidden" or pooling not in ("cls", "last", "mask"):
        return None
    if pooling == "cls":
        return shape.starts
    if pooling == "last":
        return tuple(start + length - 1 for start, length in zip(shape.starts, shape.lengths, strict=True))
    return shape.mask_rows


# ----------------------------------------------------------------------------------------------------------------------
# Layers that several families share, as graphs.
#
# m tokens, h hidden, f MLP width. Tensors of a layer stand under `layers.<i>.`, those of the graph under `<i>.`.


class Layer(NamedTuple):
    """Sizes of a transformer layer: h, a heads of h / a columns, f, and what the packed sequences are."""

    hidden: int
    heads: int
    mlp: int
    activation: Activation
    eps: float
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, spec: ModelSpec, shape: PackedBatch) -> Layer:
        """Return the sizes of the layers of a model in a request."""
        return cls(spec.hidden, spec.heads, spec.mlp, spec.activation, spec.norm_eps, shape.lengths)


def post_norm(net: GraphBuilder, name: str, stored: str, x: str, n: Layer) -> str:
    """Add a layer that norms behind each residual (BERT): x [m, h] -> [m, h]."""
    attention = _attention(net, name, stored, x, n)  # [m, h]
    total = net.sum(f"{name}r", x, attention, roles.ATTENTION_SUM)
    y = net.norm(f"{name}y", total, roles.AFTER_ATTENTION, f"{stored}attention_norm", n.eps)
    total = net.sum(f"{name}s", y, _mlp(net, name, stored, y, n), roles.MLP_SUM)
    return net.norm(f"{name}x", total, roles.AFTER_MLP, f"{stored}mlp_norm", n.eps)


def pre_norm(net: GraphBuilder, name: str, stored: str, x: str, n: Layer) -> str:
    """Add a layer that norms before each block (ViT): x [m, h] -> [m, h].

    A block of the graph begins behind its first norm, which one kernel computes with the residual sum before it.
    """
    u = net.norm(f"{name}u", x, roles.BEFORE_ATTENTION, f"{stored}attention_norm", n.eps)
    net.begin_block()
    y = net.sum(f"{name}y", x, _attention(net, name, stored, u, n), roles.AFTER_ATTENTION)
    v = net.norm(f"{name}v", y, roles.BEFORE_MLP, f"{stored}mlp_norm", n.eps)
    return net.sum(f"{name}x", y, _mlp(net, name, stored, v, n), roles.AFTER_MLP)


def _attention(net: GraphBuilder, name: str, stored: str, x: str, n: Layer) -> str:
    h, width = n.hidden, net.shape_of(x)[1]
    matrices = {f"{stored}{part}": h for part in ("query", "key", "value")}
    qkv = net.linear(f"{name}qkv", x, roles.QKV, matrices)  # [m, 3h]
    attention = net.attention(
        f"{name}attention",
        qkv,
        qkv,
        roles.ATTENTION,
        heads=n.heads,
        width=h,
        columns=(0, h, 2 * h),
        lengths=n.lengths,
    )
    return net.linear(f"{name}o", attention, roles.ATTENTION_OUT, {f"{stored}attention_out": width})


def _mlp(net: GraphBuilder, name: str, stored: str, x: str, n: Layer) -> str:
    up = net.linear(f"{name}up", x, roles.MLP_UP, {f"{stored}mlp_up": n.mlp})  # [m, f]
    hidden = net.activation(f"{name}g", up, roles.MLP_HIDDEN, n.activation)
    return net.linear(f"{name}down", hidden, roles.MLP_DOWN, {f"{stored}mlp_down": net.shape_of(x)[1]})
