"""Model families: a file each says what a config.json means, which tensors a model has, and its graph."""

from __future__ import annotations

from hepti_mqtt.models.families import (
    FAMILIES,
    Family,
    as_stored,
    encoder,
    family_stored,
    full,
    graph,
    input_bytes,
    largest_shape,
    layers,
    packed,
    random_inputs,
    reference,
    shape_for,
    spec_from_config,
    spec_from_dict,
    storages,
    tensor_sources,
)
from hepti_mqtt.models.kinds import Kind
from hepti_mqtt.models.tensors import TensorSource, matrix_ref, vector_ref
from hepti_mqtt.models.transformer import ModelSpec

__all__ = [
    "FAMILIES",
    "Family",
    "Kind",
    "ModelSpec",
    "TensorSource",
    "as_stored",
    "encoder",
    "family_stored",
    "full",
    "graph",
    "input_bytes",
    "largest_shape",
    "layers",
    "matrix_ref",
    "packed",
    "random_inputs",
    "reference",
    "shape_for",
    "spec_from_config",
    "spec_from_dict",
    "storages",
    "tensor_sources",
    "vector_ref",
]
