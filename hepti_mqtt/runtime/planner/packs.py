"""Runs of several requests: which of those that wait go into one, its packed batch, and the answer of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Final

import numpy as np

from hepti_mqtt.errors import RemoteError
from hepti_mqtt.runtime.planner.flight import Array, Chunk, Item
from hepti_mqtt.spec import Spec

MICRO: Final = 64  # tokens: with fewer rows kernels stream weights instead of computing


@dataclass(frozen=True, slots=True)
class Batching:
    """How requests that wait run together: of so many at the most; delay_s: how long one waits for others to come."""

    requests: int = 16
    delay_s: float = 0.0


def choose(
    turns: Iterator[Item], batching: Batching, max_tokens: int, share: int | None = None
) -> tuple[tuple[Item, ...], float]:
    """Return what runs next of all that waits, in the order of its turns, and when.

    That is the first, and what can run with it: a power of two of requests, so that few shapes come again and again,
    sorted by length, so that equal lengths are equal shapes whatever their order. Chunks of one request run apart, as
    it was told what they cost. A batch that has room for more is due when the first of it has waited for the delay, any
    other at once, and what was lost before too. share: no more than so many, the others run elsewhere.
    """
    first = next(turns)
    chosen, jobs, tokens = [first], {id(first.job)}, first.tokens
    full = not first.packable or first.job.attempts[first.chunk] > 0
    for item in turns if first.packable else ():
        if len(chosen) == batching.requests:
            break
        if not item.packable or item.part.shape.want != first.part.shape.want or id(item.job) in jobs:
            continue
        if tokens + item.tokens > max_tokens:
            full = True
            continue
        chosen.append(item)
        jobs.add(id(item.job))
        tokens += item.tokens
    full = full or len(chosen) == batching.requests or tokens == max_tokens
    due_s = -inf if full else min(map(partial(_waits_until, batching.delay_s), chosen))
    size = 1 << (min(len(chosen), share or len(chosen)).bit_length() - 1)
    return tuple(sorted(chosen[:size], key=lambda item: item.part.shape.sizes)), due_s


def _waits_until(delay_s: float, item: Item) -> float:
    """Return how long a request may wait for others, with as much time left until its deadline."""
    deadline_s = inf if item.job.deadline_s is None else item.job.deadline_s
    return min(item.job.came_s + delay_s, deadline_s - delay_s)


def packed(chunks: Sequence[Chunk]) -> Chunk:
    """Return the batch of several chunks one behind the other; they ask for the same."""
    if len(chunks) == 1:
        return chunks[0]
    first, *others = (chunk.shape for chunk in chunks)
    return Chunk(first.joined(others), np.concatenate([chunk.inputs for chunk in chunks]))


def micro_batches(chunks: Sequence[Chunk]) -> tuple[Chunk, ...]:
    """Return chunks cut into batches of consecutive items of size `MICRO` or a little more, in their order."""
    return tuple(part for chunk in chunks for part in _cut(chunk))


def _cut(chunk: Chunk) -> Iterator[Chunk]:
    shape = chunk.shape
    first, taken, left = 0, 0, shape.size
    for stop, size in enumerate(shape.sizes, 1):
        taken, left = taken + size, left - size
        if left and (taken < MICRO or left < MICRO):
            continue
        part, where = shape.part(first, stop)
        yield Chunk(part, chunk.inputs[where])
        first, taken = stop, 0


def parted(spec: Spec, chunks: Sequence[Chunk], output: Array) -> list[Array]:
    """Return the rows of each chunk in the output of their packed batch; raises RemoteError if they do not add up."""
    if len(chunks) == 1:
        return [output]
    rows = [spec.output_shape(chunk.shape)[0] for chunk in chunks]
    if len(output) != sum(rows):
        raise RemoteError(f"the devices answered with {len(output)} rows instead of {sum(rows)}; use one version")
    return np.split(output, np.cumsum(rows[:-1]).tolist())
