"""Mixtures of experts of decoders: what config.json says about them, and how checkpoints store their matrices.

E experts, h hidden, f columns of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Final, NamedTuple

from hepti_mqtt.core.errors import ModelError
from hepti_mqtt.core.spec import Activation
from hepti_mqtt.models.config import JsonConfig
from hepti_mqtt.models.tensors import Place, TensorSource, prefixed, table, weight
from hepti_mqtt.models.transformer import BlockSpec, ModelSpec

PARTS: Final = ("gate", "up", "down")
ROUTER: Final = "router"
#: How names of packed MXFP4 tensors end (safetensors of gpt-oss).
PACKED: Final = "_blocks"


class Experts(NamedTuple):
    """How a family describes and stores a mixture of experts."""

    #: Keys of config.json: the number of experts, how many a row chooses, their width.
    number: str
    chosen: str = "num_experts_per_tok"
    width: str = "intermediate_size"
    #: Flag: the weights of chosen experts add up to 1; empty: they do.
    normed: str = ""
    #: Return the layers that have an MLP instead.
    dense_layers: Callable[[JsonConfig], tuple[int, ...]] = lambda _: ()
    #: The activation, if config.json does not say it.
    activation: Activation | None = None
    #: Key of the limit of gate and up columns, and its default.
    limit: tuple[str, float] = ("", 0.0)
    #: Added to up columns.
    up_offset: float = 0.0
    #: Router and experts have biases.
    biases: bool = False
    #: Ends of the stored names of matrices and biases.
    ends: tuple[str, str] = (".weight", ".bias")
    #: Rows of gate and up alternate in their common matrix.
    alternate: bool = False
    #: Matrices are stored as [E, in, out], or packed as [E, out, in].
    by_inputs: bool = False


#: Names of the number of experts: transformers 5 saves Qwen3-MoE with the second.
_NUMBERS: Final = ("num_experts", "num_local_experts")


def mixture(layer: Mapping[str, str], router: str, *experts: str) -> Mapping[str, str]:
    """Return the names of a checkpoint for the parts of a layer that has experts.

    experts: names of gate, up and down matrices: of one expert each with `{}`, else of all experts together.
    """
    names = (f"expert_{part}" for part in PARTS)
    return {**layer, ROUTER: router, **dict(zip(names, experts, strict=True))}


def with_experts(block: BlockSpec, config: JsonConfig, of: Experts) -> BlockSpec:
    """Return the block with the mixture of a config.json; raises ModelError."""
    config = config.renamed({name: of.number for name in _NUMBERS if name != of.number})
    number, chosen = config.positive(of.number), config.positive(of.chosen)
    if chosen > number:
        raise ModelError(f"config.json: {of.chosen} {chosen} of {number} experts cannot be chosen")
    key, limit = of.limit
    block = replace(
        block,
        biases=block.biases + ((ROUTER, "experts") if of.biases else ()),
        experts=number,
        chosen=chosen,
        normed_experts=config.flag(of.normed, False) if of.normed else True,
        gate_limit=config.number(key, limit) if key else 0.0,
        up_offset=of.up_offset,
    )
    if dense := of.dense_layers(config):
        return replace(block, dense_layers=dense, dense_mlp=config.positive("intermediate_size"))
    return block


def layers_without(config: JsonConfig) -> tuple[int, ...]:
    """Return the layers without experts of Qwen's mixtures; raises ModelError."""
    named, step = config.get("mlp_only_layers", []), config.positive("decoder_sparse_step", 1)
    if not isinstance(named, list) or not all(type(i) is int for i in named):
        raise config.bad_value("mlp_only_layers", "a list of numbers of layers", named)
    return tuple(i for i in range(config.positive("num_hidden_layers")) if i in named or (i + 1) % step)


def alone(name: str, part: str) -> str:
    """Return the name of a part of a common matrix in checkpoints that store it alone, as GGUF does."""
    return f"{name}.{part.removeprefix('expert_')}"


def expert_tensors(
    spec: ModelSpec, here: str, base: tuple[str, ...], stored: str, called: Mapping[str, str], of: Experts
) -> Iterator[TensorSource]:
    """Yield the tensors of all experts of a layer; called: the stored names of its parts, below `stored`."""
    count, h, f = spec.block.experts, spec.hidden, spec.mlp
    for part in PARTS:
        name, (n_in, n_out) = called[f"expert_{part}"], (f, h) if part == "down" else (h, f)
        together = [p for p in PARTS if called[f"expert_{p}"] == name]
        step, width = (len(together), len(together) * n_out) if of.alternate else (1, len(together) * n_out)
        begin = together.index(part) * (1 if of.alternate else n_out)
        wholes = prefixed(base, stored + name)
        for e in range(count):
            canonical = f"{here}experts.{e}.{part}.weight"
            if "{}" in name:
                yield weight(canonical, tuple(f"{whole.format(e)}.weight" for whole in wholes), n_in, n_out)
                continue
            shape, first = (count, width, n_in), e * width + begin
            upright = (count, n_in, width) if of.by_inputs else shape
            places = [Place(whole + of.ends[0], upright, first, step, of.by_inputs) for whole in wholes]
            if of.by_inputs:
                places += [Place(whole + PACKED, shape, first, step) for whole in wholes]
            places += [Place(f"{alone(whole, part)}.weight", (count, n_out, n_in), e * n_out) for whole in wholes]
            yield _placed(weight(canonical, (), n_in, n_out), places)
        if of.biases:
            places = [Place(whole + of.ends[1], (count, width), begin, step) for whole in wholes]
            places += [Place(f"{alone(whole, part)}.bias", (count, n_out), 0) for whole in wholes]
            yield _placed(table(f"{here}experts.{part}.bias", (), count, n_out), places)


def _placed(source: TensorSource, places: list[Place]) -> TensorSource:
    names = tuple(place.name for place in places)
    return replace(source, stored=names, stored_shape=places[0].shape, places=tuple(places))
