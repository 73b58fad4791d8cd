"""Mixtures of experts of decoders: their keys of config.json, and the places of their matrices in checkpoints.

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
#: Suffix of tensors in MXFP4 (safetensors of gpt-oss).
PACKED: Final = "_blocks"


class Experts(NamedTuple):
    """The keys of config.json and the storage of a family's mixture of experts."""

    #: Key of the number of experts.
    number: str
    #: Key of the number of experts that a row chooses.
    chosen: str = "num_experts_per_tok"
    #: Key of the columns of an expert.
    width: str = "intermediate_size"
    #: Key of the flag that the weights of a row's chosen experts add up to 1; empty: they always do.
    normed: str = ""
    #: Return the layers that have an MLP instead.
    dense_layers: Callable[[JsonConfig], tuple[int, ...]] = lambda _: ()
    #: The activation; None: config.json names it.
    activation: Activation | None = None
    #: Key of `BlockSpec.gate_limit`, and its default; an empty key means no limit.
    limit: tuple[str, float] = ("", 0.0)
    #: Added to up columns.
    up_offset: float = 0.0
    #: Router and experts have biases.
    biases: bool = False
    #: Suffixes of the stored names of matrices and biases that hold all experts.
    ends: tuple[str, str] = (".weight", ".bias")
    #: Rows of gate and up alternate in the matrix that holds both.
    alternate: bool = False
    #: Matrices in numbers are stored as [E, in, out]; those in MXFP4 as [E, out, in].
    by_inputs: bool = False


#: Both names of the key of the number of experts; transformers 5 saves Qwen3-MoE with the second.
_NUMBERS: Final = ("num_experts", "num_local_experts")


def mixture(layer: Mapping[str, str], router: str, *experts: str) -> Mapping[str, str]:
    """Return the stored names of a layer's parts (`Decoder.part_names`) with those of a mixture.

    layer: without the mixture. experts: gate, up and down; a name with `{}` is an expert's matrix, a name without it
    the matrix of all experts.
    """
    names = (f"expert_{part}" for part in PARTS)
    return {**layer, ROUTER: router, **dict(zip(names, experts, strict=True))}


def with_experts(block: BlockSpec, config: JsonConfig, experts: Experts) -> BlockSpec:
    """Return the block with the mixture of a config.json; raises ModelError."""
    config = config.renamed({name: experts.number for name in _NUMBERS if name != experts.number})
    number, chosen = config.positive(experts.number), config.positive(experts.chosen)
    if chosen > number:
        raise ModelError(f"config.json: {experts.chosen} {chosen} exceeds the {number} experts; correct one of them")
    key, limit = experts.limit
    block = replace(
        block,
        biases=block.biases + ((ROUTER, "experts") if experts.biases else ()),
        experts=number,
        chosen=chosen,
        normed_experts=config.flag(experts.normed, False) if experts.normed else True,
        gate_limit=config.number(key, limit) if key else 0.0,
        up_offset=experts.up_offset,
    )
    if dense := experts.dense_layers(config):
        return replace(block, dense_layers=dense, dense_mlp=config.positive("intermediate_size"))
    return block


def layers_without(config: JsonConfig) -> tuple[int, ...]:
    """Return the layers of Qwen's mixtures that have an MLP; raises ModelError."""
    named, step = config.get("mlp_only_layers", []), config.positive("decoder_sparse_step", 1)
    if not isinstance(named, list) or not all(type(i) is int for i in named):
        raise config.bad_value("mlp_only_layers", "a list of numbers of layers", named)
    return tuple(i for i in range(config.positive("num_hidden_layers")) if i in named or (i + 1) % step)


def alone(name: str, part: str) -> str:
    """Return the name of a part in checkpoints that store it alone, as GGUF does; name: of the common matrix."""
    return f"{name}.{part.removeprefix('expert_')}"


def expert_tensors(
    spec: ModelSpec,
    layer: str,
    base: tuple[str, ...],
    stored: str,
    part_names: Mapping[str, str],
    experts: Experts,
) -> Iterator[TensorSource]:
    """Yield the tensors of all experts of a layer; see `text.layer_tensors`."""
    count, h, f = spec.block.experts, spec.hidden, spec.mlp
    for part in PARTS:
        name, (n_in, n_out) = part_names[f"expert_{part}"], (f, h) if part == "down" else (h, f)
        together = [p for p in PARTS if part_names[f"expert_{p}"] == name]  # parts of one stored matrix
        step, width = (len(together), len(together) * n_out) if experts.alternate else (1, len(together) * n_out)
        begin = together.index(part) * (1 if experts.alternate else n_out)
        wholes = prefixed(base, stored + name)
        for e in range(count):
            canonical = f"{layer}experts.{e}.{part}.weight"
            if "{}" in name:
                yield weight(canonical, tuple(f"{whole.format(e)}.weight" for whole in wholes), n_in, n_out)
                continue
            shape, first = (count, width, n_in), e * width + begin
            numbers_shape = (count, n_in, width) if experts.by_inputs else shape
            ends = experts.ends
            places = [Place(whole + ends[0], numbers_shape, first, step, experts.by_inputs) for whole in wholes]
            if experts.by_inputs:
                places += [Place(whole + PACKED, shape, first, step) for whole in wholes]
            places += [Place(f"{alone(whole, part)}.weight", (count, n_out, n_in), e * n_out) for whole in wholes]
            yield _placed(weight(canonical, (), n_in, n_out), places)
        if experts.biases:
            places = [Place(whole + experts.ends[1], (count, width), begin, step) for whole in wholes]
            places += [Place(f"{alone(whole, part)}.bias", (count, n_out), 0) for whole in wholes]
            yield _placed(table(f"{layer}experts.{part}.bias", (), count, n_out), places)


def _placed(source: TensorSource, places: list[Place]) -> TensorSource:
    names = tuple(place.name for place in places)
    return replace(source, stored=names, stored_shape=places[0].shape, places=tuple(places))
