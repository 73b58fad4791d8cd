"""Tensor ops: each knows which regions of its inputs and weights a region of its result needs, and its kernel."""

from __future__ import annotations

from hepti_mqtt.lowering.ops.attention import Attention, AttentionAt, ReorderedAttention
from hepti_mqtt.lowering.ops.base import Call, Input, Op, Operand
from hepti_mqtt.lowering.ops.dense import Activation, Add, LayerNorm, Linear, Moments, Normalise, Whole
from hepti_mqtt.lowering.ops.maps import AveragePool, Conv, GlobalAverage, JoinMaps, MaxPool, Pixels
from hepti_mqtt.lowering.ops.session import Append, State
from hepti_mqtt.lowering.ops.views import Columns, Flatten, Join, Reshape, Rows, Slice

__all__ = [
    "Activation",
    "Add",
    "Append",
    "Attention",
    "AttentionAt",
    "AveragePool",
    "Call",
    "Columns",
    "Conv",
    "Flatten",
    "GlobalAverage",
    "Input",
    "Join",
    "JoinMaps",
    "LayerNorm",
    "Linear",
    "MaxPool",
    "Moments",
    "Normalise",
    "Op",
    "Operand",
    "Pixels",
    "ReorderedAttention",
    "Reshape",
    "Rows",
    "Slice",
    "State",
    "Whole",
]
