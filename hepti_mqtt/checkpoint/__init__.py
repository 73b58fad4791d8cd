"""Model directories: opening real ones, and writing seeded random ones of the same shape."""

from hepti_mqtt.checkpoint.directory import Checkpoint, described_spec, model_name, model_parts
from hepti_mqtt.checkpoint.make import KINDS, is_kind, make_model, spec_of_kind

__all__ = [
    "KINDS",
    "Checkpoint",
    "described_spec",
    "is_kind",
    "make_model",
    "model_name",
    "model_parts",
    "spec_of_kind",
]
