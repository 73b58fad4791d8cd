"""Which version of MQTT a broker speaks: tried in turn, for some answer nothing at all to another one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from hepti_mqtt.errors import NetworkError
from hepti_mqtt.transport.data_link import DataLink
from hepti_mqtt.transport.link import Link, Unanswered, VersionRefused

ANSWER_S: Final = 1.0  # amqtt misreads some CONNECTs of MQTT 5 and waits for more instead of refusing

AnyLink = Link | DataLink


class Versions:
    """The versions to try, first the one that the broker took when it had refused another."""

    def __init__(self, order: tuple[int, ...]) -> None:
        self.order = order

    def open(self, make: Callable[[int, float], AnyLink], timeout_s: float, stop: Callable[[], bool]) -> AnyLink:
        """Return an open link, of the first version that the broker accepts; raises as `Link.open` does.

        make: a link of a version, not yet open, and how long the answer to its CONNECT may take.
        """
        until, refused = time.monotonic() + timeout_s, False
        for protocol in self.order:
            last = protocol == self.order[-1]
            # The network may take all the time: to another version it would be no faster.
            link = make(protocol, ANSWER_S if protocol == 5 and not last else float("inf"))
            try:
                link.open(max(until - time.monotonic(), 0.1), stop)
            except VersionRefused as error:
                if last:
                    raise
                refused = refused or not isinstance(error, Unanswered)
                continue
            if refused:  # who was only silent may have been slow
                self.order = (protocol, *(p for p in self.order if p != protocol))
            return link
        raise NetworkError("no version of MQTT to try")
