"""Which version of MQTT a broker speaks: tried in turn, for some answer nothing at all to another one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from hepti_mqtt.errors import NetworkError
from hepti_mqtt.transport.data_link import DataLink
from hepti_mqtt.transport.link import Link, VersionRefused

ANSWER_S: Final = 1.0  # amqtt misreads some CONNECTs of MQTT 5 and waits for more instead of refusing

AnyLink = Link | DataLink


class Versions:
    """The versions to try, the one that the broker took first."""

    def __init__(self, order: tuple[int, ...]) -> None:
        self.order = order

    def open(self, make: Callable[[int], AnyLink], timeout_s: float, stop: Callable[[], bool]) -> AnyLink:
        """Return an open link, of the first version that the broker accepts; raises as `Link.open` does.

        make: a link of a version, not yet open.
        """
        until = time.monotonic() + timeout_s
        for protocol in self.order:
            last = protocol == self.order[-1]
            left = max(until - time.monotonic(), 0.1)
            link = make(protocol)
            try:
                link.open(left if last else min(left, ANSWER_S), stop)
            except VersionRefused:
                if last:
                    raise
                continue
            self.order = (protocol, *(p for p in self.order if p != protocol))
            return link
        raise NetworkError("no version of MQTT to try")
