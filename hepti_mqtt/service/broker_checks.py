"""What a planner asks its broker before it begins: whether it is alone."""

from __future__ import annotations

import logging
import queue
import time
import uuid
from typing import Final

from hepti_mqtt.errors import ConfigError, HeptiError, RefusedError, WireError
from hepti_mqtt.protocol.limits import LOW_QUEUE, low_limit, low_queue
from hepti_mqtt.protocol.messages import Status, decode_status, encode_status
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.transport import BrokerUrl, Connected, PahoTransport, Refused, Room, State, largest_packet, queue_room

ECHO_S: Final = 3.0
ANSWER_S: Final = 3.0

_QUESTION: Final = Status("offline", 0)


def require_alone(url: BrokerUrl, site: str) -> None:
    """Return when no other planner serves the site.

    A planner that lives contradicts at once who says on its status topic that it is offline; so we say it, not
    retained. Our own words come back to us after what the broker had retained, so that nothing needs to be waited out
    at a site without a planner. A status that a dead planner left behind costs some seconds of waiting.

    Raises ConfigError naming the other planner; NetworkError and RefusedError of the connection.
    """
    topic = Topics(site).planner_status()
    inbox: queue.SimpleQueue[Status | State] = queue.SimpleQueue()

    def heard(_topic: str, payload: bytes) -> None:
        try:
            inbox.put(decode_status(payload))
        except WireError:
            return  # cleared, or of a program that is not ours

    name = f"hepti-{site}-planner-check-{uuid.uuid4().hex[:12]}"
    transport = PahoTransport(url, name, on_message=heard, on_state=inbox.put, name="planner-check")
    try:
        transport.subscribe([(topic, 1)])
        transport.connect()
        known = _known(inbox, transport, topic)
        if known is not None and known.state == "online" and _contradicted(inbox):
            raise ConfigError(
                f"site {site} has a planner already (boot {known.boot}); stop it first, or choose another --site"
            )
    finally:
        transport.close()


def _known(inbox: queue.SimpleQueue[Status | State], transport: PahoTransport, topic: str) -> Status | None:
    """Return the retained status: what comes before the question that we publish."""
    known = None
    until = time.monotonic() + ECHO_S
    while (got := _get(inbox, until)) is not None:
        if isinstance(got, Connected):
            transport.publish(topic, encode_status(_QUESTION), 1)
        elif isinstance(got, Refused):
            raise RefusedError(
                f"the broker does not let the planner use {topic}: {got.reason}; see the access list in "
                "broker/acl.example"
            )
        elif got == _QUESTION:
            return known
        elif isinstance(got, Status):
            known = got
    return known


def _contradicted(inbox: queue.SimpleQueue[Status | State]) -> bool:
    until = time.monotonic() + ANSWER_S
    while (got := _get(inbox, until)) is not None:
        if isinstance(got, Status) and got != _QUESTION:
            return got.state == "online"
    return False


def _get(inbox: queue.SimpleQueue[Status | State], until: float) -> Status | State | None:
    try:
        return inbox.get(timeout=max(until - time.monotonic(), 0.0))
    except queue.Empty:
        return None


# ----------------------------------------------------------------------------------------------------------------------
# What the planner's broker does not let through, or keeps too little of: often nobody else is told.


LOW_BYTES: Final = 1 << 20  # an exchange of a common model, or a tile of its weights, has less
LIMIT_ANSWER_S: Final = 10.0


def warn_of_limits(url: BrokerUrl, name: str, topic: str, log: logging.Logger) -> Room | None:
    """Say where the broker's limits are lower than models need; return its room for waiting messages if it is small.

    name: for connections of its own. topic: one on which the planner may write and read. It takes some round trips and
    a message of 1 MiB, so it is not for a start that others wait for.
    """
    try:
        largest = largest_packet(
            url, client_id=f"{name}-size", topic=topic, wanted_bytes=LOW_BYTES, timeout_s=LIMIT_ANSWER_S
        )
        if largest < LOW_BYTES:
            log.warning("%s", low_limit(largest, url.place))
        room = queue_room(url, client_id=f"{name}-room", topic=topic, wanted=LOW_QUEUE, timeout_s=LIMIT_ANSWER_S)
    except HeptiError as error:
        log.warning("cannot find the limits of the broker: %s", error)
        return None
    if room is not None:
        log.warning("%s", low_queue(*room, url.place))
    return room
