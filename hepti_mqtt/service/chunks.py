"""A request cut into runs: whole sequences, in order, as many in each as one Program may hold."""

from __future__ import annotations

from hepti_mqtt.runtime.planner.flight import Chunk
from hepti_mqtt.service.requests import Prepared
from hepti_mqtt.spec import RequestShape


def cut(prepared: Prepared, max_tokens: int) -> tuple[Chunk, ...]:
    """Return the chunks of a request, each of at most `max_tokens` tokens.

    Their outputs, one below the other, are the output of the whole. Raises ValueError if one sequence is longer.
    """
    shape = prepared.shape
    if shape.cache:  # one sequence, and its inputs are more than its ids
        return (Chunk(shape, prepared.inputs),)
    images = prepared.inputs.ndim == 4
    chunks = []
    first, start, stop = 0, 0, 0  # first sequence, first and last packed row of the chunk
    for place, length in enumerate((*shape.lengths, max_tokens + 1)):
        if stop > start and stop - start + length > max_tokens:
            inputs = prepared.inputs[first:place] if images else prepared.inputs[start:stop]
            rows = tuple(row - start for row in shape.mask_rows if start <= row < stop)
            chunks.append(Chunk(RequestShape(shape.lengths[first:place], shape.want, rows), inputs))
            first, start = place, stop
        if place < len(shape.lengths) and length > max_tokens:
            raise ValueError(f"sequence {place} has {length} tokens, a run holds {max_tokens}")
        stop += length
    return tuple(chunks)
