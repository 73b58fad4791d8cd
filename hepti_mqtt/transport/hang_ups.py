"""Messages on which a broker hangs up: most say no more than that, and it would go on for ever."""

from __future__ import annotations

from typing import Final

from hepti_mqtt.transport.outbox import Message

HANG_UPS: Final = 3


class HangUps:
    """How often on end the broker has hung up on one message of QoS 1.

    A connection that is lost for other reasons says nothing of the message under way, however often it happens. A
    broker that restarts is away for a while, or says that it leaves; a link that fails ends in silence. A broker that
    does not want the message closes the connection, and takes the next one at once. What was sent after the message may
    have been the reason too, since acknowledgements can get lost with the connection. So after a hang-up the message
    goes alone, once the broker has acknowledged the subscriptions, and only what follows then is counted.
    """

    def __init__(self) -> None:
        self.suspect: Message | None = None  # the next to go alone
        self._count = 0

    def lost(self, first: Message | None) -> None:
        """A connection is lost; first: the message that was longest under way if the broker hung up, else None."""
        if first is None or first is not self.suspect:
            self.suspect, self._count = first, 0
        else:
            self._count += 1

    def away(self) -> None:
        """The broker could not be reached at first: it was not the message on which it hung up."""
        self._count = 0

    def unwanted(self) -> Message | None:
        """Return a message to be given up, once."""
        if self._count < HANG_UPS:
            return None
        gone, self.suspect, self._count = self.suspect, None, 0
        return gone
