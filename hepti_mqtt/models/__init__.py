"""Model families: a file for each reads its config.json, and has its tensors, its graph and its NumPy reference."""

from __future__ import annotations

from hepti_mqtt.models.families import (
    FAMILIES,
    full_ref,
    graph,
    input_bytes,
    is_planned_for,
    largest_shape,
    left_unquantised,
    models_of,
    preprocessor,
    quantised,
    random_inputs,
    reference,
    representative_shape,
    require_transformer,
    single_sequence,
    spec_from_config,
    spec_from_dict,
    tensor_sources,
    tokenizer_class,
    towers_of,
    usual_product,
    views,
    weight_dtypes,
    with_cache,
    with_hugging_face_keys,
    with_storages,
    without_false_tie,
    without_missing_pooler,
)
from hepti_mqtt.models.kinds import Kind
from hepti_mqtt.models.tensors import TensorSource, vector_ref
from hepti_mqtt.models.transformer import ModelSpec

__all__ = [
    "FAMILIES", "Kind", "ModelSpec", "TensorSource", "full_ref", "graph", "input_bytes",
    "is_planned_for", "largest_shape", "left_unquantised", "models_of", "preprocessor", "quantised", "random_inputs",
    "reference", "representative_shape", "require_transformer", "single_sequence", "spec_from_config", "spec_from_dict",
    "tensor_sources", "tokenizer_class", "towers_of", "usual_product", "vector_ref", "views", "weight_dtypes",
    "with_cache", "with_hugging_face_keys", "with_storages", "without_false_tie", "without_missing_pooler",
]  # fmt: skip
