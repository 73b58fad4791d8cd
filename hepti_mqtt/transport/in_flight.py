"""What is on its way over one connection."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from hepti_mqtt.transport.link import Link
from hepti_mqtt.transport.outbox import Filters, Message
from hepti_mqtt.transport.versions import AnyLink


@dataclass(slots=True)
class Session:
    """What belongs to one connection; only the network thread touches it."""

    inflight: dict[int, Message] = field(default_factory=dict)  # by packet id, QoS 1, sent
    waiting: deque[Message] = field(default_factory=deque)  # QoS 1, until the broker's window opens
    subscribing: dict[int, tuple[int, Filters]] = field(default_factory=dict)  # by packet id
    awaited: set[int] = field(default_factory=set)  # tokens whose SUBACK comes before Connected
    writing: Message | None = None
    alone: bool = False  # the first message of QoS 1 goes alone, until it is acknowledged
    announced: bool = False
    begun_at: float = field(default_factory=time.monotonic)

    def silent_s(self, link: AnyLink) -> float:
        """Return how long the broker could have acknowledged our subscriptions by now, and did not."""
        # What it kept for us comes before, and shows that it is at work. Where it kept nothing it may have forgotten
        # the acknowledgement, though it sends.
        heard_at = link.heard_at if isinstance(link, Link) and link.resumed else self.begun_at
        return time.monotonic() - max(self.begun_at, heard_at)

    @property
    def held(self) -> bool:
        """Return whether nothing more may be sent now."""
        return self.alone and bool(self.awaited or self.inflight)

    @property
    def first(self) -> Message | None:
        """Return the message of QoS 1 that has waited longest for its acknowledgement."""
        return next(iter(self.inflight.values()), None)
