"""A request cut into runs: whole items, in order, as many in each as one Program may hold."""

from __future__ import annotations

from hepti_mqtt.runtime.planner.flight import Chunk
from hepti_mqtt.service.requests import Prepared


def cut(prepared: Prepared, most: int) -> tuple[Chunk, ...]:
    """Return the chunks of a request, each of at most the size `most`.

    Their outputs, one below the other, are the output of the whole. Raises ValueError if one item is larger.
    """
    shape, chunks = prepared.shape, []
    first, size = 0, 0  # first item and size of the chunk
    for place, more in enumerate(shape.sizes):
        if more > most:
            raise ValueError(f"item {place} has size {more}, a run holds {most}")
        if size + more > most:
            part, where = shape.part(first, place)
            chunks.append(Chunk(part, prepared.inputs[where]))
            first, size = place, 0
        size += more
    part, where = shape.part(first, len(shape.sizes))
    return (*chunks, Chunk(part, prepared.inputs[where]))
