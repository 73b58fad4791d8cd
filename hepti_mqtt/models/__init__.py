"""Model families: a file each says what a config.json means, which tensors a model has, and its graph."""

from __future__ import annotations

from hepti_mqtt.models.families import (
    FAMILIES,
    Family,
    files_in_our_words,
    full_ref,
    graph,
    input_bytes,
    is_planned_for,
    largest_shape,
    layer_count,
    preprocessor,
    random_inputs,
    reference,
    representative_shape,
    require_transformer,
    single_sequence,
    spec_from_config,
    spec_from_dict,
    tensor_sources,
    tokenizer_class,
    weight_dtypes,
    without_missing_pooler,
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
    "files_in_our_words",
    "full_ref",
    "graph",
    "input_bytes",
    "is_planned_for",
    "largest_shape",
    "layer_count",
    "matrix_ref",
    "preprocessor",
    "random_inputs",
    "reference",
    "representative_shape",
    "require_transformer",
    "single_sequence",
    "spec_from_config",
    "spec_from_dict",
    "tensor_sources",
    "tokenizer_class",
    "vector_ref",
    "weight_dtypes",
    "without_missing_pooler",
]
