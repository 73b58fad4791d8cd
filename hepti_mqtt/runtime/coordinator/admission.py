"""Admission of requests: refuse or queue; cancelled and expired requests."""

from __future__ import annotations

from math import inf
from typing import Final

from hepti_mqtt.core.errors import CancelledRequestError, OverloadedError
from hepti_mqtt.core.ids import whole_model
from hepti_mqtt.core.recent import Recent
from hepti_mqtt.runtime.coordinator.batches import split_into_micro_batches
from hepti_mqtt.runtime.coordinator.interface import CoordinatorCommand, LogEvent, RefuseRequest
from hepti_mqtt.runtime.coordinator.plan_groups import PlanGroup, PlanGroups
from hepti_mqtt.runtime.coordinator.requests import Request, RequestKey, WorkItem

MAX_QUEUED_PER_CLIENT: Final = 64  # queued requests of one client, per model
MAX_QUEUED: Final = 256  # queued requests of all clients, per model
MAX_IN_BURST: Final = 512  # both limits after a reconnection: as many as a broker delivers together
BURST_S: Final = 10.0  # in which clients and broker deliver requests that they kept
MAX_QUEUED_BYTES: Final = 256 << 20  # inputs of queued requests, per model
CANCELLED_S: Final = 600.0  # in which a busy broker delivers a request after its cancel
MAX_CANCELLED: Final = 1024  # remembered cancels
CANCELLED: Final = "the client has cancelled the request"


class Admission:
    """Decides which requests are queued."""

    def __init__(self, groups: PlanGroups) -> None:
        self._groups = groups
        self._number = 0  #: number of queued requests so far
        self._burst_until_s = -inf
        self._cancelled = Recent[RequestKey, float](MAX_CANCELLED)  #: until when a cancelled request is refused

    def expect_burst(self, now: float) -> None:
        """Raise the limits after a reconnection: requests that broker and clients kept come together."""
        self._burst_until_s = now + BURST_S

    def refuse_or_none(self, request: Request, now: float) -> list[CoordinatorCommand] | None:
        """Return the commands that refuse a request; None if it may be queued."""
        name = request.key.model
        if self._cancelled.pop(request.key.client_request, -inf) > now:
            return [RefuseRequest(request, CancelledRequestError(CANCELLED))]
        items = (item for group in self._groups.of_model(name) for item in group.queue)
        queued = list({id(item.request): item.request for item in items}.values())
        is_burst = now < self._burst_until_s
        client_limit, limit = (MAX_IN_BURST, MAX_IN_BURST) if is_burst else (MAX_QUEUED_PER_CLIENT, MAX_QUEUED)
        if (of_client := sum(r.key.client == request.key.client for r in queued)) >= client_limit:
            text = f"{of_client} requests of {request.key.client} wait for {name} already; wait for some answers"
            return self.refuse_overloaded(request, text)
        nbytes = sum(r.nbytes for r in queued)
        if len(queued) >= limit or (queued and nbytes + request.nbytes > MAX_QUEUED_BYTES):
            text = f"{len(queued)} requests of {nbytes} bytes wait for {name} already; try again later, or add devices"
            return self.refuse_overloaded(request, text)
        return None

    @staticmethod
    def refuse_overloaded(request: Request, text: str) -> list[CoordinatorCommand]:
        """Refuse a request because of overload."""
        return [LogEvent("overloaded", text), RefuseRequest(request, OverloadedError(text))]

    def enqueue(self, group: PlanGroup, request: Request, now: float) -> list[CoordinatorCommand]:
        """Queue a request in its group, or refuse it if no plan exists or is expected."""
        group.pace.record_request(now, served=group.plans.in_use is not None)
        if group.error is not None and not group.plans.may_serve():
            return [RefuseRequest(request, group.error)]
        self._number += 1
        request.sequence, request.arrived_s = self._number, now
        generation = request.generation
        if generation is None or generation.carried.size:  # other texts are recorded at their end
            group.recent.lengths.append(max(batch.shape.size for batch in request.batches))
        if group.active is not None and group.active.replicas and request.wants_result and generation is None:
            request.batches = split_into_micro_batches(request.batches)  # for the replicas
        group.queue.append(WorkItem(request, i) for i in range(len(request.batches) if request.wants_result else 1))
        return []

    def find_cancelled(self, key: RequestKey, now: float) -> list[tuple[PlanGroup, Request]]:
        """Return the parts of a cancelled request; if none is known, refuse the request when it arrives."""
        groups = [group for group in self._groups if whole_model(group.name) == key.model]
        parts = {id(r): (group, r) for group in groups for r in group.requests() if r.key.client_request == key}
        if not parts:
            self._cancelled[key] = now + CANCELLED_S
        return list(parts.values())

    @staticmethod
    def expired(group: PlanGroup, now: float) -> list[Request]:
        """Return the requests whose deadline has passed."""
        late = {id(r): r for r in group.requests() if r.deadline_s is not None and now > r.deadline_s}
        return list(late.values())
