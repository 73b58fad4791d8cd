"""What the planner's broker does not let through, or keeps too little of: often nobody else is told."""

from __future__ import annotations

import logging
from typing import Final

from hepti_mqtt.errors import HeptiError
from hepti_mqtt.transport import BrokerUrl, Room, largest_packet, queue_room
from hepti_mqtt.wire.limits import LOW_QUEUE, low_limit, low_queue

LOW_BYTES: Final = 1 << 20  # an exchange of a common model, or a tile of its weights, has less
ANSWER_S: Final = 10.0


def warn_of_limits(url: BrokerUrl, name: str, topic: str, log: logging.Logger) -> Room | None:
    """Say where the broker's limits are lower than models need; return its room for waiting messages if it is small.

    name: for connections of its own. topic: one on which the planner may write and read. It takes some round trips and
    a message of 1 MiB, so it is not for a start that others wait for.
    """
    try:
        largest = largest_packet(url, client_id=f"{name}-size", topic=topic, wanted_bytes=LOW_BYTES, timeout_s=ANSWER_S)
        if largest < LOW_BYTES:
            log.warning("%s", low_limit(largest, url.place))
        room = queue_room(url, client_id=f"{name}-room", topic=topic, wanted=LOW_QUEUE, timeout_s=ANSWER_S)
    except HeptiError as error:
        log.warning("cannot find the limits of the broker: %s", error)
        return None
    if room is not None:
        log.warning("%s", low_queue(*room, url.place))
    return room
