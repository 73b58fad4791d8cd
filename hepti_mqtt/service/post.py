"""Requests and answers: a connection that brings requests, and the answers by which the broker may forget them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Final

from hepti_mqtt.errors import HeptiError, NetworkError, PacketLimitError
from hepti_mqtt.runtime.planner.flight import Job, RequestKey
from hepti_mqtt.service.desk import Desk, Reply, repeated
from hepti_mqtt.service.inbox import Asked, Decoder
from hepti_mqtt.service.journal import LIVES, Journal
from hepti_mqtt.service.unheard import Outgoing, Unheard
from hepti_mqtt.transport import (
    BrokerUrl,
    Connected,
    Delivery,
    DeliveryWindow,
    Disconnected,
    OnState,
    PahoTransport,
    Receipt,
    State,
    warn_of_limits,
)

LOOK_S: Final = 5.0  # after the start, which nothing should hold up
CLOSED_S: Final = 0.5  # for the last acknowledgements
AGAIN_S: Final = 0.5  # between two tries of an answer to which nobody was subscribed ...
UNHEARD_S: Final = 20.0  # ... for so long: a broker that was killed has forgotten who reads what, and they come back
RETAINED: Final = 64  # topics with retained requests that are told of


class Post:
    """Brings users' requests and sends their answers; what waits for an answer holds nothing else up.

    name: of the planner among MQTT clients. place: of the journal's file. answers: the connection that answers go out
    on. asked: takes a request, on the network thread. changed: what happened to the connection that brings them.
    """

    def __init__(
        self,
        url: BrokerUrl,
        name: str,
        place: Path,
        answers: PahoTransport,
        desk: Desk,
        decoder: Decoder,
        asked: Callable[[Asked], None],
        changed: OnState,
        log: logging.Logger,
    ) -> None:
        self._answers, self._desk, self._decoder, self._asked, self._log = answers, desk, decoder, asked, log
        self._tell, self._met = changed, False
        self._stands: Connected | None = None  # the connection that brings requests
        self._window = DeliveryWindow(self._spilled)
        self._url, self._name, self._look_s = url, name, time.monotonic() + LOOK_S
        self._requests = PahoTransport(
            url,
            f"{name}-requests",
            on_message=lambda _topic, _payload: None,
            on_delivery=self.delivered,
            on_state=self._changed,
            clean=False,
            name="planner-requests",
        )
        self._journal = Journal(place, self._acknowledge)
        self._unheard = Unheard()
        self._closed = False
        self._told: set[str] = set()  # topics with retained requests

    def connect(self) -> None:
        """Connect; raises as `PahoTransport.connect` does."""
        self._requests.subscribe(self._decoder.requests())
        self._requests.connect()

    def close(self) -> None:
        """Take no more requests; the broker keeps those that are not answered, for the next planner."""
        self._closed = True
        self._requests.close(timeout_s=CLOSED_S)
        self._journal.close()

    def delivered(self, delivery: Delivery) -> None:
        """Take a request from the broker, on the network thread."""
        asked = None if delivery.retained else self._decoder.decode(delivery.topic, delivery.payload)
        if delivery.retained:
            self._retained(delivery.topic)
        if delivery.receipt is not None:
            self._window.opened(delivery.receipt)
        if isinstance(asked, Asked):
            self._asked(replace(asked, delivery=delivery))
        elif delivery.receipt is not None:
            self._acknowledge(delivery.receipt)

    def _retained(self, topic: str) -> None:
        """A request is not taken that comes anew with every connection; tell once of its topic, of so many of them."""
        self._decoder.counters["retained"] += 1
        if topic in self._told or len(self._told) >= RETAINED:
            return
        self._told.add(topic)
        self._log.warning(
            "not computed: a request that the broker retains on %s, which would come again with every connection; send "
            "requests without retain, and clear this one: mosquitto_pub -r -n -t %s",
            topic,
            topic,
        )

    def _changed(self, state: State) -> None:
        """Hand on what happened to the connection, and say what a broker without our session has lost."""
        if isinstance(state, Connected):
            if self._met and not state.resumed:
                self._log.warning(
                    "the broker has forgotten what it keeps for the planner: requests that were sent since it is "
                    "back, before the planner was, are lost; see persistence and autosave_interval in broker/README.md"
                )
            self._met, self._stands = True, state
        elif isinstance(state, Disconnected):
            self._stands = None
        self._tell(state)

    def _acknowledge(self, receipt: Receipt) -> None:
        self._requests.acknowledge(receipt)
        self._window.closed(receipt)

    def _spilled(self) -> None:
        self._log.warning("the broker may have dropped requests: more came at once than it keeps, see `hepti doctor`")
        self._here_again()

    def _here_again(self) -> None:
        """Say that we are there once more: clients that wait then send again what the broker may have dropped."""
        if (stands := self._stands) is not None:  # else it is said when it stands again
            self._tell(stands)

    def _look(self) -> None:
        """Find out what the broker takes and keeps."""
        room = warn_of_limits(self._url, self._name, self._decoder.topics.probe("doctor"), self._log)
        if room is not None:
            self._window.limit = room.in_flight
            self._here_again()

    # -- any thread -------------------------------------------------------------------------------------------------

    def name(self, asked: Asked) -> str:
        """Return the name of a request, if it brings none."""
        return self._journal.name(asked)

    def lives(self, asked: Asked) -> str | None:
        """Return why a request is not taken once more, None if it is."""
        if (lives := self._journal.lives(asked)) <= LIVES:
            return None
        return f"the planner has been lost {lives} times with this request; see its log, and ask for less at once"

    def wait(self, asked: Asked, job: Job) -> None:
        """A request waits for its answer."""
        self._journal.wait(asked, job)

    def turn_away(self, asked: Asked, error: HeptiError) -> None:
        """Answer a request that is not even read."""
        self.reply(asked, self._desk.refuse_unread(asked.model, asked.client, asked.payload, error, self.name(asked)))

    def reply(self, asked: Asked, reply: Reply) -> None:
        """Answer a request that did not wait."""
        self._last(RequestKey(asked.model, asked.client, reply.request), reply, self._journal.turned_away(asked))

    def answer(self, job: Job, reply: Reply) -> None:
        """Answer a request that has waited."""
        self._last(job.key, reply, self._journal.over(job))

    def part(self, job: Job, reply: Reply) -> None:
        """Send a part of an answer."""
        self._send(repeated(reply) if self._journal.answered(job.key) else reply)

    def again(self, now: float) -> None:
        """Send those answers again that nobody has heard, or that found no room; now: by `time.monotonic`."""
        if now > self._look_s:
            self._look_s = inf
            threading.Thread(target=self._look, name="planner-room", daemon=True).start()
        while (answer := self._unheard.due(now)) is not None and self._publish(answer):
            continue

    def _last(self, key: RequestKey, reply: Reply, taken: Callable[[], None]) -> None:
        """Send the last word on a request; when the broker has it, it need not keep the request any longer."""
        self._send(repeated(reply) if self._journal.answer(key) else reply, taken)

    def _send(self, reply: Reply, taken: Callable[[], None] | None = None) -> None:
        self._publish(Outgoing(reply, taken))

    def _publish(self, answer: Outgoing) -> bool:
        """Send an answer, or keep it until there is room; return whether there was."""
        reply = answer.reply
        try:
            self._answers.publish(
                reply.topic, reply.payload, 1, taken=None if answer.taken is None else partial(self._taken, answer)
            )
        except PacketLimitError as error:
            shorter = self._desk.too_large(reply, error)
            if len(shorter.payload) < len(reply.payload):
                return self._publish(replace(answer, reply=shorter))
            self._unpublished(reply, error)
            if answer.taken is not None:
                answer.taken()  # not even that error gets through, and the request would come again for ever
        except NetworkError as error:
            self._no_room(answer, error)
            return False
        return True

    def _no_room(self, answer: Outgoing, error: NetworkError) -> None:
        """Keep an answer for later, unless we are closed; of a part the whole answer tells."""
        if answer.taken is not None and not self._closed:
            self._unheard.put(time.monotonic() + AGAIN_S, answer)
        self._unpublished(answer.reply, error)

    def _unpublished(self, reply: Reply, error: NetworkError) -> None:
        self._decoder.counters["unpublished"] += 1
        count = self._decoder.counters["unpublished"]
        if count & (count - 1) == 0:  # each is tried again, so that the log would be full of it
            self._log.warning("not published to %s: %s (%d so far)", reply.topic, error, count)

    def _taken(self, answer: Outgoing, heard: bool) -> None:
        """The broker has an answer, on the network thread."""
        now = time.monotonic()
        until_s = now + UNHEARD_S if answer.until_s is None else answer.until_s
        if heard or now > until_s or not self._unheard.room(answer):
            assert answer.taken is not None
            answer.taken()
        else:
            self._unheard.put(now + AGAIN_S, replace(answer, until_s=until_s))
