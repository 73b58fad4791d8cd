"""Packed batches: several requests or steps as one run, and the output of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.core.errors import RemoteError
from hepti_mqtt.core.spec import RequestShape, Spec
from hepti_mqtt.protocol.frames import DecoderSession

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Batch:
    """A packed batch that runs as one: its shape and token ids [m] i32 or pixels [B, C, S, S] u8."""

    shape: RequestShape
    inputs: Array


MICRO_BATCH_TOKENS: Final = 64  # with fewer rows, kernels are limited by reading weights


def pack_steps(runs: Sequence[tuple[Batch, DecoderSession]]) -> tuple[Batch, tuple[DecoderSession, ...]]:
    """Return one run of several sessions, padded to a power of two of items, so that few Programs are needed.

    Padding items have no session, and their outputs are ignored.
    """
    if len(runs) == 1:
        return runs[0][0], (runs[0][1],)
    filler = Batch(runs[0][0].shape.decode_step(1), np.zeros_like(runs[0][0].inputs)), DecoderSession()
    size = 1 << (len(runs) - 1).bit_length()
    batches, sessions = zip(*runs, *[filler] * (size - len(runs)), strict=True)
    return concatenate(batches), sessions


def concatenate(batches: Sequence[Batch]) -> Batch:
    """Return one batch of several with the same `want`, in order.

    In runs of sessions, places come first, then all ids, then temperatures.
    """
    if len(batches) == 1:
        return batches[0]
    first, *others = (batch.shape for batch in batches)
    if not first.session_rows:
        return Batch(first.concatenate(others), np.concatenate([batch.inputs for batch in batches]))
    cuts = ((len(c.shape.sizes), len(c.shape.sizes) + c.shape.size) for c in batches)
    parts = zip(*(np.split(c.inputs, cut) for c, cut in zip(batches, cuts, strict=True)), strict=True)
    return Batch(first.concatenate(others), np.concatenate([*chain.from_iterable(parts)]))


def split_into_micro_batches(batches: Sequence[Batch]) -> tuple[Batch, ...]:
    """Return batches split into smaller ones of consecutive items, of about `MICRO_BATCH_TOKENS` tokens."""
    return tuple(part for batch in batches for part in _split(batch))


def _split(batch: Batch) -> Iterator[Batch]:
    shape = batch.shape
    first, tokens, left = 0, 0, shape.size
    for stop, size in enumerate(shape.sizes, 1):
        tokens, left = tokens + size, left - size
        if left and (tokens < MICRO_BATCH_TOKENS or left < MICRO_BATCH_TOKENS):
            continue
        part, where = shape.slice_items(first, stop)
        yield Batch(part, batch.inputs[where])
        first, tokens = stop, 0


def split_output(spec: Spec, batches: Sequence[Batch], output: Array) -> list[Array]:
    """Return the rows of each batch in the output of their run; raises RemoteError if the rows do not add up."""
    if len(batches) == 1:
        return [output]
    rows = [spec.output_shape(batch.shape)[0] for batch in batches]
    if len(output) != sum(rows):
        raise RemoteError(f"the devices answered with {len(output)} rows instead of {sum(rows)}; use one version")
    return np.split(output, np.cumsum(rows[:-1]).tolist())
