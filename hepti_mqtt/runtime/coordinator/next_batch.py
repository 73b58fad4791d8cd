"""Select the next batch of a group, and predict the shapes of its next runs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from math import inf
from typing import Final

from hepti_mqtt.core.spec import RequestShape
from hepti_mqtt.models import largest_shape, representative_shape
from hepti_mqtt.runtime.coordinator.batches import concatenate
from hepti_mqtt.runtime.coordinator.fair_queue import select_batch
from hepti_mqtt.runtime.coordinator.kv_caches import reserved_rows, rows_of_text
from hepti_mqtt.runtime.coordinator.plan_groups import MAX_PREBUILT_SHAPES, PlanGroup
from hepti_mqtt.runtime.coordinator.requests import WorkItem

MAX_URGENT_SHAPES: Final = 2  # shapes that need a Program before the plan serves
MAX_SHAPE_NUMBERS: Final = 1024  # sizes and mask rows of a shape in a Prepare, whose size is limited


def next_batch(group: PlanGroup, max_items: int | None, room_rows: int) -> tuple[tuple[WorkItem, ...], float]:
    """Return the next batch and its start time: now, or later if more requests may join it.

    Empty if no queued item has room for a session. max_items: limit for this replica, None for no limit.
    room_rows: cache rows of all sessions under a plan, 0 for a model without sessions.
    """
    turns = _with_room(group, room_rows) if room_rows else group.queue.in_turn()
    first = next(turns, None)
    return ((), inf) if first is None else _select(group, chain([first], turns), max_items)


def _with_room(group: PlanGroup, room_rows: int) -> Iterator[WorkItem]:
    """Yield the queued items in turn; after an item without room for its session, no session begins.

    A decoding step waits for running steps, so that it joins the next ones.
    """
    together = group.served.batching.max_requests > 1
    stepping = {r.plan_version for r in group.runs.values() if together and r.is_step and r.is_computing}
    versions = {plan.version for plan in group.usable_executables}
    used = max((reserved_rows(group, version) for version in versions), default=0)
    with_sessions = {plan.version for plan in group.session_plans}
    for item in group.queue.in_turn():
        text = item.request.generation
        if text is not None and text.joins and text.session.plan_version in stepping:
            continue
        needed = 0 if text is None or text.session.plan_version in with_sessions else rows_of_text(text)
        if needed and used + needed > room_rows:
            used = room_rows
            continue
        used += needed
        yield item


def _select(
    group: PlanGroup, turns: Iterator[WorkItem], max_items: int | None = None
) -> tuple[tuple[WorkItem, ...], float]:
    return select_batch(turns, group.served.batching, largest_shape(group.served.spec).size, max_items)


def shapes_to_build(group: PlanGroup) -> tuple[tuple[RequestShape, ...], int]:
    """Return the predicted shapes of runs under a new plan, and the number to build before the plan is ready.

    Queued shapes come first, then recent ones, then the one that plans are optimised for. If requests wait without
    a plan, only the first queued shapes are needed before it is ready.
    """
    queued = dict.fromkeys(_queued_shapes(group))
    usual = representative_shape(group.served.spec, group.recent.typical_length(group.served.default_length))
    program_shape = group.served.spec.input_spec.program_shape
    shapes = dict.fromkeys(map(program_shape, (*queued, *reversed(group.recent.shapes), usual)))
    first = [s for s in shapes if len(s.sizes) + len(s.plain().mask_rows) <= MAX_SHAPE_NUMBERS][:MAX_PREBUILT_SHAPES]
    if not queued or group.plans.in_use is not None:
        return tuple(first), len(first)
    urgent = set(islice(dict.fromkeys(map(program_shape, queued)), MAX_URGENT_SHAPES))
    return tuple(first), max(sum(s in urgent for s in first), 1)


def _queued_shapes(group: PlanGroup) -> Iterator[RequestShape]:
    """Yield the shapes of the first runs of the queue, as if it was dispatched now."""
    queue = group.queue.copy()
    queue.discard_finished()
    for _ in range(MAX_PREBUILT_SHAPES):
        if not queue:
            return
        items, _ = _select(group, queue.in_turn())
        queue.remove(items)
        if len(items) > 1 and items[0].request.generation is None:
            yield concatenate([item.batch for item in items]).shape
        elif items[0].request.wants_result:
            for item in items:
                yield from item.request.upcoming_shapes(item.index)
