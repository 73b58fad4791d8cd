"""Requests in and answers out: the broker keeps a request until its answer is acknowledged."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from math import inf
from pathlib import Path
from typing import IO, Final

from hepti_mqtt.config.state import write_atomically
from hepti_mqtt.errors import NetworkError, PacketLimitError, RemoteError
from hepti_mqtt.runtime.coordinator.requests import Request, RequestKey
from hepti_mqtt.service.decoder import MessageDecoder, RawRequest
from hepti_mqtt.service.envelope import peek_id
from hepti_mqtt.service.handler import ClientRequest, Reply, encode_failure
from hepti_mqtt.transport.base import Connected, Delivery, Disconnected, OnState, Receipt, State, Will
from hepti_mqtt.transport.broker_connection import BrokerConnection
from hepti_mqtt.transport.broker_limits import DeliveryWindow, warn_of_limits
from hepti_mqtt.transport.url import BrokerUrl

# ----------------------------------------------------------------------------------------------------------------------
# Answers to resend: the broker reported no subscriber, or the send queue was full.


UNHEARD: Final = 256  # waiting at once: each may hold one of the requests that the broker keeps in flight (512)
UNHEARD_BYTES: Final = 32 << 20
CLIENT_UNHEARD: Final = 64  # of these, of one client: one that never listens must not push out what others wait for
CLIENT_UNHEARD_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class OutgoingAnswer:
    """An answer on its way.

    requests: what it settles once the broker has it; None for a part of an answer. until_s: when it is no longer
    resent; None until the broker has first reported no subscriber.
    """

    reply: Reply
    requests: Sequence[RawRequest] | None
    until_s: float | None = None


class UnacknowledgedAnswers:
    """Answers to resend, by due time, few of each client; all methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all that follows
        self._waiting: deque[tuple[float, OutgoingAnswer]] = deque()  # the first due comes first

    def put_unheard(self, due_s: float, answer: OutgoingAnswer) -> list[OutgoingAnswer]:
        """Keep an answer that nobody has heard; return those that are given up for it.

        They are the last of the same client, or of the one that has most if all of them have too many. The only answer
        of a client may have any size.
        """
        with self._lock:
            self._waiting.append((due_s, answer))
            client, gone = answer.reply.key.client, list[OutgoingAnswer]()
            while _too_many(own := self._unheard_of(client), CLIENT_UNHEARD, CLIENT_UNHEARD_BYTES):
                gone.append(self._give_up(own[-1]))
            while _too_many(found := self._unheard_of(None), UNHEARD, UNHEARD_BYTES):
                clients = {answer.reply.key.client for answer in found}
                most = max(map(self._unheard_of, sorted(clients)), key=lambda own: (len(own), _nbytes(own)))
                gone.append(self._give_up(most[-1]))
            return gone

    def _unheard_of(self, client: str | None) -> list[OutgoingAnswer]:
        """Return the unheard answers of a client, or of all; what the connection had no room for is none of them."""
        unheard = (answer for _, answer in self._waiting if answer.until_s is not None)
        return [answer for answer in unheard if client in (None, answer.reply.key.client)]

    def _give_up(self, answer: OutgoingAnswer) -> OutgoingAnswer:
        self._waiting = deque(item for item in self._waiting if item[1] is not answer)
        return answer

    def put(self, due_s: float, answer: OutgoingAnswer) -> None:
        """Keep an answer until it is due."""
        with self._lock:
            self._waiting.append((due_s, answer))

    def take_due(self, now: float) -> OutgoingAnswer | None:
        """Remove and return the first answer that is due, None if there is none."""
        with self._lock:
            if not self._waiting or self._waiting[0][0] > now:
                return None
            return self._waiting.popleft()[1]


def _nbytes(answers: Sequence[OutgoingAnswer]) -> int:
    return sum(len(answer.reply.payload) for answer in answers)


def _too_many(answers: Sequence[OutgoingAnswer], most: int, most_bytes: int) -> bool:
    return len(answers) > most or (len(answers) > 1 and _nbytes(answers) > most_bytes)


# ----------------------------------------------------------------------------------------------------------------------
# Request journal: which requests are unacknowledged at the broker, and which an earlier planner already answered.
#
# The broker delivers unacknowledged requests again after a planner crash. A file in its state directory records which
# of them may have been answered, and how many planners have crashed on each.


MAX_MARKS: Final = 4096  # marks of each kind
MAX_DELIVERY_ATTEMPTS: Final = 4  # planner crashes with a request; the next planner refuses it
FILE_BYTES: Final = 1 << 20  # then the file is rewritten with the remembered marks
_MARK_BYTES: Final = 16
_ANSWERED: Final = b"A"
_MET_AGAIN: Final = b"M"
_ENDED: Final = b"E"  # a redelivered request was answered

_log: Final = logging.getLogger("hepti.planner")


class Journal:
    """What the planner knows of requests across restarts; all methods may be called from any thread.

    path: of the file; if it cannot be written, that is logged once and the journal works in memory. acknowledge:
    lets the broker forget a delivery.
    """

    def __init__(self, path: Path, acknowledge: Callable[[Receipt], None]) -> None:
        self._path, self._acknowledge = path, acknowledge
        self._lock = threading.Lock()  # guards all that follows
        self._waiting: dict[tuple[RequestKey, bytes], list[RawRequest]] = {}  # by key and digest
        self._answering: set[Receipt] = set()  # of requests whose answer the broker does not have yet
        self._answered: OrderedDict[bytes, None] = OrderedDict()
        self._met: Counter[bytes] = Counter()
        self._met_now: set[bytes] = set()
        self._file: IO[bytes] | None = None
        self._read()
        self._rewrite()

    def id_for(self, raw: RawRequest) -> str:
        """Return an id for a request without one; a redelivered request gets the same id."""
        if raw.delivery is None or raw.delivery.receipt is None:
            return uuid.uuid4().hex
        packet = str(raw.delivery.receipt.packet).encode()
        made = _mark(raw.model.encode(), raw.client.encode(), packet, raw.payload).hex()
        if raw.delivery.repeated:
            return made
        # A broker that has lost its session restarts its packet ids, so a new request may repeat an old id.
        key = RequestKey(raw.model, raw.client, made)
        with self._lock:
            known = _mark_of(key) in self._answered or any(key == waiting for waiting, _ in self._waiting)
        return uuid.uuid4().hex if known else made

    def count_attempts(self, raw: RawRequest) -> int:
        """Return how many planners, this one included, have received a request as a redelivery."""
        if raw.delivery is None or not raw.delivery.repeated:
            return 0
        mark = _content(raw)
        with self._lock:
            if mark not in self._met_now:
                self._met_now.add(mark)
                self._met[mark] += 1
                self._append(_MET_AGAIN, mark)
            return self._met[mark]

    def check_attempts(self, raw: RawRequest) -> None:
        """Raise RemoteError for a request on which the planner has crashed too often."""
        if (attempts := self.count_attempts(raw)) > MAX_DELIVERY_ATTEMPTS:
            raise RemoteError(
                f"The planner crashed {attempts} times while it handled this request. See its log, and send a smaller "
                "request."
            )

    def record_waiting(self, raw: RawRequest, request: Request | ClientRequest) -> None:
        """Note the delivery of a request that waits for its answer; several deliveries of it share one answer."""
        with self._lock:
            self._waiting.setdefault((request.key, request.digest), []).append(raw)

    def take_waiting(self, request: Request | ClientRequest) -> list[RawRequest]:
        """Remove and return all deliveries of a request whose answer goes out."""
        with self._lock:
            return self._waiting.pop((request.key, request.digest), [])

    def record_answering(self, requests: Sequence[RawRequest]) -> None:
        """Note requests whose answer goes out; it may be resent for a while until they are settled."""
        with self._lock:
            self._answering |= _receipts(requests)

    def open_receipts(self) -> set[Receipt]:
        """Return the deliveries whose requests wait for their answers, or whose answers are on their way."""
        with self._lock:
            return self._answering.union(*map(_receipts, self._waiting.values()))

    def settle(self, requests: Sequence[RawRequest]) -> None:
        """Acknowledge requests whose answer the broker has."""
        with self._lock:
            self._answering -= _receipts(requests)
        for raw in requests:
            if raw.delivery is None or raw.delivery.receipt is None:
                continue
            self._acknowledge(raw.delivery.receipt)
            if raw.delivery.repeated:
                mark = _content(raw)
                with self._lock:
                    self._met.pop(mark, None)
                    self._append(_ENDED, mark)

    def record_answer(self, key: RequestKey) -> bool:
        """Note that an answer goes out; return whether an earlier one may have."""
        mark = _mark_of(key)
        with self._lock:
            before = mark in self._answered
            self._answered[mark] = None
            self._answered.move_to_end(mark)
            if len(self._answered) > MAX_MARKS:
                self._answered.popitem(last=False)
            if not before:
                self._append(_ANSWERED, mark)
            return before

    def was_answered(self, key: RequestKey) -> bool:
        """Return whether a request may have been answered already."""
        with self._lock:
            return _mark_of(key) in self._answered

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _read(self) -> None:
        try:
            data = self._path.read_bytes()
        except OSError:
            return
        size = 1 + _MARK_BYTES
        for at in range(0, len(data) - size + 1, size):  # the last record may be cut short
            kind, mark = data[at : at + 1], data[at + 1 : at + size]
            if kind == _ANSWERED:
                self._answered[mark] = None
                self._answered.move_to_end(mark)
            elif kind == _MET_AGAIN:
                self._met[mark] += 1
            elif kind == _ENDED:
                self._met.pop(mark, None)

    def _rewrite(self) -> None:
        answered = list(self._answered)[-MAX_MARKS:]
        met = [
            mark for mark, times in self._met.most_common(MAX_MARKS) for _ in range(min(times, MAX_DELIVERY_ATTEMPTS))
        ]
        self._answered = OrderedDict.fromkeys(answered)
        self._met = Counter(met)
        self._met_now &= set(met)
        data = b"".join([*(_ANSWERED + mark for mark in answered), *(_MET_AGAIN + mark for mark in met)])
        try:
            write_atomically(self._path, data)
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            self._lose(error)

    def _append(self, kind: bytes, mark: bytes) -> None:
        if self._file is None:
            return
        try:
            self._file.write(kind + mark)
            full = self._file.tell() > FILE_BYTES
        except OSError as error:
            self._lose(error)
            return
        if full:
            self._file.close()
            self._rewrite()

    def _lose(self, error: OSError) -> None:
        self._file = None
        _log.warning("Cannot write the request journal %s: %s. Free disk space there.", self._path, error)


def _receipts(requests: Sequence[RawRequest]) -> set[Receipt]:
    found = (raw.delivery.receipt for raw in requests if raw.delivery is not None)
    return {receipt for receipt in found if receipt is not None}


def _mark(*parts: bytes) -> bytes:
    found = blake2b(digest_size=_MARK_BYTES)
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.digest()


def _mark_of(key: RequestKey) -> bytes:
    return _mark(key.model.encode(), key.client.encode(), key.id.encode())


def _content(raw: RawRequest) -> bytes:
    return _mark(raw.model.encode(), raw.client.encode(), raw.payload)


# ----------------------------------------------------------------------------------------------------------------------
# The request channel: a connection that brings requests, and answers that let the broker forget them.


LOOK_S: Final = 5.0  # after the start, so that the probe delays nothing
CLOSED_S: Final = 0.5  # for the last acknowledgements
RESEND_S: Final = 0.5  # between two attempts to deliver an answer
RESEND_FOR_S: Final = 20.0  # readers resubscribe meanwhile when a killed broker has lost their subscriptions
LOST_S: Final = 60.0  # so long a request may be read and its answer resent; all other time it waits, and is known


class RequestChannel:
    """Receives users' requests and sends their answers; an answer that cannot go out yet delays no other.

    name: of the planner among MQTT clients. place: of the journal's file. answers: the connection for answers.
    on_request: takes a request, on the network thread. on_state: state of the connection that brings requests. will: of
    that connection. most: unacknowledged requests that the broker may deliver.

    Where requests are shared, the session ends with the connection: a broker goes on giving a planner that is away its
    share for as long as it has a session, and no other planner gets that.
    """

    def __init__(
        self,
        url: BrokerUrl,
        name: str,
        place: Path,
        answers: BrokerConnection,
        decoder: MessageDecoder,
        on_request: Callable[[RawRequest], None],
        on_state: OnState,
        will: Will | None = None,
        most: int = 1024,
    ) -> None:
        self._answers, self._decoder, self._on_request, self._log = answers, decoder, on_request, decoder.log
        self._on_state, self._was_connected = on_state, False
        self._connected: Connected | None = None  # the current connection that brings requests
        self._window, self._most = DeliveryWindow(self._handle_overflow), most
        self._url, self._name, self._probe_at_s = url, name, time.monotonic() + LOOK_S
        self._requests = BrokerConnection(
            url,
            f"{name}-requests",
            on_delivery=self.handle_delivery,
            on_state=self._handle_state,
            will=will,
            clean=decoder.shared is not None,
            name="planner-requests",
            receive_maximum=most,
        )
        self.journal = Journal(place, self._acknowledge)
        self._unheard = UnacknowledgedAnswers()
        self._lost = set[Receipt]()
        self._closed, self._sharing = False, False
        self._requests.subscribe(self._decoder.requests())
        self.connect = self._requests.connect

    def close(self) -> None:
        """Take no more requests; the broker keeps the unanswered ones for the next planner."""
        self._closed = True
        self._requests.close(timeout_s=CLOSED_S)
        self.journal.close()

    def set_sharing(self, sharing: bool) -> None:
        """Take a share of the shared requests, or leave all of them to others; one thread calls this."""
        shared = self._decoder.shared
        if shared is None or sharing == self._sharing:
            return
        self._sharing = sharing
        if sharing:
            self._requests.subscribe([(topic, 1) for topic in shared.shared_requests()])
        else:
            self._requests.unsubscribe(shared.shared_requests())

    # -- network thread ---------------------------------------------------------------------------------------------

    def handle_delivery(self, delivery: Delivery) -> None:
        """Take a request from the broker."""
        raw = None if delivery.retained else self._decoder.decode(delivery.topic, delivery.payload)
        if delivery.retained:
            self._log.warn_once(
                "retained",
                delivery.topic,
                f"Ignored a retained request on {delivery.topic}: it would be repeated after every reconnection. "
                f"Publish requests without retain, and clear this one: mosquitto_pub -r -n -t {delivery.topic}",
            )
        elif raw is None and delivery.payload:
            self._refuse_address(delivery)
        if delivery.receipt is not None:
            self._window.opened(delivery.receipt, inf)  # until it is read
        if isinstance(raw, RawRequest):
            self._on_request(replace(raw, delivery=delivery))
        elif delivery.receipt is not None:
            self._acknowledge(delivery.receipt)

    def _refuse_address(self, delivery: Delivery) -> None:
        """Answer a request on a topic with a name that cannot be, and log it once."""
        request = peek_id(delivery.payload)
        found = self._decoder.misaddressed(delivery.topic, request or "unread")
        if found is None:
            return
        topic, error = found
        self._log.warn_once("misaddressed", delivery.topic, f"Refused a request on {delivery.topic}: {error}")
        with suppress(NetworkError):
            self._answers.publish(topic, encode_failure(request, error), 1)

    def _handle_state(self, state: State) -> None:
        """Pass on the connection's state; warn if the broker has lost the session."""
        if isinstance(state, Connected):
            if self._was_connected and not state.resumed and self._decoder.shared is None:
                self._log.log.warning(
                    "The broker lost the planner's session: requests sent between its restart and the planner's "
                    "reconnection are lost. See persistence in docs/guide/broker.md."
                )
            self._was_connected, self._connected = True, state
        elif isinstance(state, Disconnected):
            self._connected = None
        self._on_state(state)

    def _acknowledge(self, receipt: Receipt) -> None:
        self._requests.acknowledge(receipt)
        self._window.closed(receipt)

    def _handle_overflow(self) -> None:
        self._log.log.warning("The broker's queue overflowed and may have dropped requests. Run `hepti doctor`.")
        self._announce()

    def _handle_taken(self, answer: OutgoingAnswer, heard: bool) -> None:
        """The broker has an answer; heard: it had a subscriber."""
        assert answer.requests is not None
        now = time.monotonic()
        until_s = now + RESEND_FOR_S if answer.until_s is None else answer.until_s
        if heard or now > until_s:
            self.journal.settle(answer.requests)
            return
        for given_up in self._unheard.put_unheard(now + RESEND_S, replace(answer, until_s=until_s)):
            client = given_up.reply.key.client
            self._log.warn_once("unheard", client, f"Dropped answers of client {client}: it is subscribed to none.")
            self.journal.settle(given_up.requests or ())

    # -- any thread -------------------------------------------------------------------------------------------------

    def begin(self, raw: RawRequest) -> None:
        """Note that a request is read now; it waited for that until now."""
        if raw.delivery is not None and raw.delivery.receipt is not None:
            self._window.begun(raw.delivery.receipt, time.monotonic())

    def comes_again(self, raw: RawRequest) -> bool:
        """Return whether the broker delivers a request again, because it came on an earlier connection."""
        receipt, connected = None if raw.delivery is None else raw.delivery.receipt, self._connected
        return (
            receipt is not None and connected is not None and connected.resumed and self._window.is_of_earlier(receipt)
        )

    def _announce(self) -> None:
        """Announce the planner again, so that waiting clients resend what the broker may have dropped."""
        if (connected := self._connected) is not None:  # otherwise the next connection announces it
            self._on_state(connected)

    def _probe_broker(self) -> None:
        topic = self._decoder.topics.probe("doctor")
        room = warn_of_limits(self._url, self._name, topic, self._log.log, self._most)
        if room is not None:
            self._window.limit = room.in_flight
            self._announce()

    def send(self, reply: Reply, requests: Sequence[RawRequest] | None = None) -> None:
        """Send an answer, and settle `requests` when the broker has it; None: the reply is a part of an answer."""
        journal = self.journal
        journal.record_answering(requests or ())
        before = journal.was_answered(reply.key) if requests is None else journal.record_answer(reply.key)
        if before:
            reply = reply._replace(payload=b'{"repeated": true, ' + reply.payload.removeprefix(b"{"))
        self._publish(OutgoingAnswer(reply, requests))

    def resend_due(self, now: float) -> None:
        """Resend the answers that are due; now: by `time.monotonic`. Probes the broker's limits once."""
        if now > self._probe_at_s:
            self._probe_at_s = inf
            threading.Thread(target=self._probe_broker, name="planner-room", daemon=True).start()
        self._look_for_lost(now)
        while (answer := self._unheard.take_due(now)) is not None and self._publish(answer):
            continue

    @property
    def unacknowledged(self) -> int:
        """Return how many requests the broker keeps because they are not answered yet."""
        return len(self._window)

    def _look_for_lost(self, now: float) -> None:
        """Warn of requests that are neither answered nor waiting: where they fill the broker's window none comes."""
        if (old := self._window.opened_before(now - LOST_S)) and (lost := old - self.journal.open_receipts()):
            for _ in lost - self._lost:
                self._log.record(
                    "unacknowledged",
                    f"{len(lost)} requests came {LOST_S:g} s ago and are neither answered nor waiting; they keep "
                    "places of the few that the broker delivers at once, so restart the planner before all are taken",
                )
            self._lost = lost

    def _publish(self, answer: OutgoingAnswer) -> bool:
        """Publish an answer, or keep it until the send queue has room; return whether it had."""
        reply = answer.reply
        taken = None if answer.requests is None else partial(self._handle_taken, answer)
        try:
            self._answers.publish(reply.topic, reply.payload, 1, taken=taken)
        except PacketLimitError as error:
            shorter = reply.too_large(error)
            if len(shorter.payload) < len(reply.payload):
                return self._publish(replace(answer, reply=shorter))
            self._log.record("unpublished", f"not published to {reply.topic}: {error}")
            self.journal.settle(answer.requests or ())  # even the error does not get through: do not meet it again
        except NetworkError as error:
            if answer.requests is not None and not self._closed:  # the whole answer repeats its parts
                self._unheard.put(time.monotonic() + RESEND_S, answer)
            self._log.record("unpublished", f"not published to {reply.topic}: {error}")
            return False
        return True
