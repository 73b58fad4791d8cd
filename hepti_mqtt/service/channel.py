"""Receive requests and send answers; the broker keeps a request until its answer is acknowledged."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from math import inf
from pathlib import Path
from typing import IO, Final, NamedTuple

from hepti_mqtt.config.state import write_atomically
from hepti_mqtt.core.errors import IdInUseError, NetworkError, PacketLimitError, RemoteError
from hepti_mqtt.core.recent import Recent
from hepti_mqtt.runtime.coordinator.requests import RequestKey
from hepti_mqtt.service.decoder import MessageDecoder, RawRequest
from hepti_mqtt.service.envelope import peek_id
from hepti_mqtt.service.handler import Reply, RequestIdentity, encode_failure
from hepti_mqtt.transport.base import Connected, Delivery, Disconnected, OnState, Receipt, State, Will
from hepti_mqtt.transport.broker_connection import BrokerConnection
from hepti_mqtt.transport.broker_limits import warn_of_limits
from hepti_mqtt.transport.url import BrokerUrl

# ----------------------------------------------------------------------------------------------------------------------
# Answers to resend: the broker reported no subscriber, or the send queue was full.


UNDELIVERED: Final = 256  # of all clients; each leaves its request unacknowledged in the broker's delivery window
UNDELIVERED_BYTES: Final = 32 << 20
CLIENT_UNDELIVERED: Final = 64  # per client, so that a client without subscription displaces no other client's answers
CLIENT_UNDELIVERED_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class OutgoingAnswer:
    """An answer to publish, with the requests that it settles."""

    reply: Reply
    requests: Sequence[RawRequest] | None  #: settled after the broker's acknowledgement; None for a partial answer
    resend_until_s: float | None = None  #: end of the resends; None until the broker reports no subscriber


class AnswersToResend:
    """Answers to resend, in order of due time, limited per client; callable on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the following fields
        self._waiting: deque[tuple[float, OutgoingAnswer]] = deque()  # ordered by due time

    def put_undelivered(self, due_s: float, answer: OutgoingAnswer) -> list[OutgoingAnswer]:
        """Keep an answer without subscriber; return the answers dropped to stay within the limits.

        Drop the client's last answers above its limit, then the last answers of the client with most answers. A
        client's only answer may have any size.
        """
        with self._lock:
            self._waiting.append((due_s, answer))
            client, dropped = answer.reply.key.client, list[OutgoingAnswer]()
            while _too_many(
                client_answers := self._undelivered_of(client), CLIENT_UNDELIVERED, CLIENT_UNDELIVERED_BYTES
            ):
                dropped.append(self._give_up(client_answers[-1]))
            while _too_many(undelivered := self._undelivered_of(None), UNDELIVERED, UNDELIVERED_BYTES):
                clients = {answer.reply.key.client for answer in undelivered}
                most = max(
                    map(self._undelivered_of, sorted(clients)),
                    key=lambda client_answers: (len(client_answers), _nbytes(client_answers)),
                )
                dropped.append(self._give_up(most[-1]))
            return dropped

    def _undelivered_of(self, client: str | None) -> list[OutgoingAnswer]:
        """Return the answers without subscriber of a client, or of all clients."""
        undelivered = (answer for _, answer in self._waiting if answer.resend_until_s is not None)
        return [answer for answer in undelivered if client in (None, answer.reply.key.client)]

    def _give_up(self, answer: OutgoingAnswer) -> OutgoingAnswer:
        self._waiting = deque(item for item in self._waiting if item[1] is not answer)
        return answer

    def put(self, due_s: float, answer: OutgoingAnswer) -> None:
        """Keep an answer until it is due."""
        with self._lock:
            self._waiting.append((due_s, answer))

    def take_due(self, now: float) -> OutgoingAnswer | None:
        """Remove and return the first due answer, or None."""
        with self._lock:
            if not self._waiting or self._waiting[0][0] > now:
                return None
            return self._waiting.popleft()[1]


def _nbytes(answers: Sequence[OutgoingAnswer]) -> int:
    return sum(len(answer.reply.payload) for answer in answers)


def _too_many(answers: Sequence[OutgoingAnswer], most: int, most_bytes: int) -> bool:
    return len(answers) > most or (len(answers) > 1 and _nbytes(answers) > most_bytes)


# ----------------------------------------------------------------------------------------------------------------------
# Request journal: the deliveries of unanswered requests (in memory), and marks of answered and of redelivered requests
# (in a file).
#
# The broker redelivers unacknowledged requests to the next planner. The file in the planner's state directory records
# which requests may have been answered, and how many planners ended during each request.


MAX_MARKS: Final = 4096  # of answered, and of redelivered requests
MAX_REDELIVERIES: Final = 4  # of a request to further planners; the fifth is refused
FILE_BYTES: Final = 1 << 20  # above this size, the file is rewritten with the current marks
_MARK_BYTES: Final = 16
_ANSWERED: Final = b"A"
_REDELIVERED: Final = b"M"
_ENDED: Final = b"E"  # a redelivered request was answered

_log: Final = logging.getLogger("hepti.planner")


class _Waiting(NamedTuple):
    """An unanswered request."""

    digest: bytes
    deliveries: list[tuple[str, RawRequest]]  #: each with the topic of its answer


class Journal:
    """The planner's record of requests across restarts; callable on any thread.

    path: of the file. If writing fails, the journal logs the failure once and continues in memory. acknowledge:
    acknowledges a delivery to the broker. counters: `repeated_request`, deliveries of a request that waits already.
    """

    def __init__(self, path: Path, acknowledge: Callable[[Receipt], None]) -> None:
        self._path, self._acknowledge = path, acknowledge
        self._lock = threading.Lock()  # guards the following fields
        self.counters: Counter[str] = Counter()
        self._waiting: dict[RequestKey, _Waiting] = {}
        self._answering: set[Receipt] = set()  # of requests with an unacknowledged answer
        self._answered = Recent[bytes, None](MAX_MARKS)
        self._redelivered: Counter[bytes] = Counter()
        self._redelivered_now: set[bytes] = set()
        self._file: IO[bytes] | None = None
        self._read()
        self._rewrite()

    def id_for(self, raw: RawRequest) -> str:
        """Return an id for a request without one; a redelivered request gets the same id."""
        if raw.delivery is None or raw.delivery.receipt is None:
            return uuid.uuid4().hex
        packet = str(raw.delivery.receipt.packet).encode()
        packet_id = _mark(raw.model.encode(), raw.client.encode(), packet, raw.payload).hex()
        if raw.delivery.repeated:
            return packet_id
        # A broker that has lost its session restarts its packet ids, so a new request may repeat an old id:
        # it gets a random one.
        key = RequestKey(raw.model, raw.client, packet_id)
        with self._lock:
            is_used = _mark_of(key) in self._answered or key in self._waiting
        return uuid.uuid4().hex if is_used else packet_id

    def count_redelivery(self, raw: RawRequest) -> int:
        """Count this planner once if the broker redelivers a request; return the number of planners so far."""
        if raw.delivery is None or not raw.delivery.repeated:
            return 0
        mark = _content(raw)
        with self._lock:
            if mark not in self._redelivered_now:
                self._redelivered_now.add(mark)
                self._redelivered[mark] += 1
                self._append(_REDELIVERED, mark)
            return self._redelivered[mark]

    def check_redelivery(self, raw: RawRequest) -> None:
        """Raise RemoteError for a request during which too many planners ended."""
        if (attempts := self.count_redelivery(raw)) > MAX_REDELIVERIES:
            raise RemoteError(
                f"The broker delivered this request to {attempts} planners in turn, and each ended before its answer. "
                "See the planner's log, and send a smaller request."
            )

    def record_waiting(self, raw: RawRequest, request: RequestIdentity, topic: str) -> bool:
        """Record the delivery of an unanswered request; return whether it is the first one.

        All deliveries of a request share its answer, each on its own topic. Raises IdInUseError if another request with
        this id waits.
        """
        with self._lock:
            waiting = self._waiting.setdefault(request.key, _Waiting(request.digest, []))
            if waiting.digest != request.digest:
                raise IdInUseError.of(request.key.id)
            waiting.deliveries.append((topic, raw))
            is_new = len(waiting.deliveries) == 1
            self.counters["repeated_request"] += not is_new
            return is_new

    def take_waiting(self, key: RequestKey) -> list[tuple[str, RawRequest]]:
        """Remove and return all deliveries of a request, with their topics, before its answer is sent."""
        with self._lock:
            waiting = self._waiting.pop(key, None)
            return [] if waiting is None else waiting.deliveries

    def record_answering(self, requests: Sequence[RawRequest]) -> None:
        """Record requests before their answer is sent; resends may delay their settlement."""
        with self._lock:
            self._answering |= _receipts(requests)

    def open_receipts(self) -> set[Receipt]:
        """Return the deliveries of requests without an answer, or with an unacknowledged answer."""
        with self._lock:
            waiting = (raw for request in self._waiting.values() for _, raw in request.deliveries)
            return self._answering | _receipts(waiting)

    def settle(self, requests: Sequence[RawRequest]) -> None:
        """Acknowledge requests after the broker has accepted their answer."""
        with self._lock:
            self._answering -= _receipts(requests)
        for raw in requests:
            if raw.delivery is None or raw.delivery.receipt is None:
                continue
            self._acknowledge(raw.delivery.receipt)
            if raw.delivery.repeated:
                mark = _content(raw)
                with self._lock:
                    self._redelivered.pop(mark, None)
                    self._append(_ENDED, mark)

    def record_answer(self, key: RequestKey) -> bool:
        """Record an answer before it is sent; return whether an earlier answer may have been sent."""
        mark = _mark_of(key)
        with self._lock:
            is_repeated = mark in self._answered
            self._answered[mark] = None
            if not is_repeated:
                self._append(_ANSWERED, mark)
            return is_repeated

    def was_answered(self, key: RequestKey) -> bool:
        """Return whether an earlier answer to a request may have been sent."""
        with self._lock:
            return _mark_of(key) in self._answered

    def close(self) -> None:
        """Close the file after a normal stop: no request has ended this planner, so its redeliveries do not count."""
        with self._lock:
            for mark in self._redelivered_now:
                self._append(_ENDED, mark)
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
            elif kind == _REDELIVERED:
                self._redelivered[mark] += 1
            elif kind == _ENDED:
                self._redelivered.pop(mark, None)

    def _rewrite(self) -> None:
        redelivered = [
            mark
            for mark, times in self._redelivered.most_common(MAX_MARKS)
            for _ in range(min(times, MAX_REDELIVERIES))
        ]
        self._redelivered = Counter(redelivered)
        self._redelivered_now &= set(redelivered)
        marks = [*(_ANSWERED + mark for mark in self._answered), *(_REDELIVERED + mark for mark in redelivered)]
        try:
            write_atomically(self._path, b"".join(marks))
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


def _receipts(requests: Iterable[RawRequest]) -> set[Receipt]:
    receipts = (raw.delivery.receipt for raw in requests if raw.delivery is not None)
    return {receipt for receipt in receipts if receipt is not None}


def _mark(*parts: bytes) -> bytes:
    hasher = blake2b(digest_size=_MARK_BYTES)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()


def _mark_of(key: RequestKey) -> bytes:
    return _mark(key.model.encode(), key.client.encode(), key.id.encode())


def _content(raw: RawRequest) -> bytes:
    return _mark(raw.model.encode(), raw.client.encode(), raw.payload)


# ----------------------------------------------------------------------------------------------------------------------
# The request channel: a connection that receives requests, and answers that acknowledge them.


class DeliveryWindow:
    """Unacknowledged requests of the current connection; any thread may call its methods."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the following fields
        self._connection = 0
        self._waiting: dict[int, float] = {}  # time of arrival by packet id

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, receipt: Receipt, now: float) -> None:
        """Add a request."""
        with self._lock:
            if receipt.connection != self._connection:
                self._connection = receipt.connection
                self._waiting.clear()
            self._waiting[receipt.packet] = now

    def restart_age(self, receipt: Receipt, now: float) -> None:
        """Restart a request's age, because a reader thread has begun to parse it."""
        with self._lock:
            if receipt.connection == self._connection and receipt.packet in self._waiting:
                self._waiting[receipt.packet] = now

    def is_from_earlier(self, receipt: Receipt) -> bool:
        """Return whether a request belongs to an earlier connection."""
        return receipt.connection < self._connection

    def remove(self, receipt: Receipt) -> None:
        """Remove an acknowledged request."""
        with self._lock:
            if receipt.connection == self._connection:
                self._waiting.pop(receipt.packet, None)

    def older_than(self, time_s: float) -> set[Receipt]:
        """Return the unacknowledged requests that arrived before a time."""
        with self._lock:
            return {Receipt(self._connection, packet) for packet, at_s in self._waiting.items() if at_s < time_s}


PROBE_S: Final = 5.0  # from the start to the probe of the broker's limits, so that it delays nothing
CLOSED_S: Final = 0.5  # timeout of the last acknowledgements
RESEND_S: Final = 0.5  # between two attempts to deliver an answer
RESEND_FOR_S: Final = 20.0  # clients resubscribe within this time after a broker crash that lost subscriptions
LOST_S: Final = 60.0  # a delivery this old that the journal lacks is lost: reading and resending take less


class RequestChannel:
    """Receive users' requests and send their answers; an answer that cannot be sent yet delays no other answer.

    name: the planner's MQTT client id. path: of the journal. answers: the connection for answers. on_request: called
    with a request on the network thread. on_state: called with the state of the requests' connection. will: of the
    requests' connection. most: limit of unacknowledged deliveries.

    With shared requests, the MQTT session ends with the connection. Otherwise the broker would keep assigning requests
    to a disconnected planner.
    """

    def __init__(
        self,
        url: BrokerUrl,
        name: str,
        path: Path,
        answers: BrokerConnection,
        decoder: MessageDecoder,
        on_request: Callable[[RawRequest], None],
        on_state: OnState,
        will: Will | None = None,
        most: int = 1024,
    ) -> None:
        self._answers, self._decoder, self._on_request, self._log = answers, decoder, on_request, decoder.log
        self._on_state, self._was_connected = on_state, False
        self._connected: Connected | None = None  # state of the requests' connection
        self._window = DeliveryWindow()
        self._url, self._name, self._probe_at_s = url, name, time.monotonic() + PROBE_S
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
        self.journal = Journal(path, self._acknowledge)
        self._to_resend = AnswersToResend()
        self._lost = set[Receipt]()
        self._closed, self._sharing = False, False
        self._requests.subscribe(self._decoder.requests())
        self.connect = self._requests.connect

    def close(self) -> None:
        """Stop receiving requests; the broker keeps unanswered requests for the next planner."""
        self._closed = True
        self._requests.close(timeout_s=CLOSED_S)
        self.journal.close()

    def set_sharing(self, sharing: bool) -> None:
        """Subscribe to the shared requests, or unsubscribe; called on one thread."""
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
        """Handle a request from the broker."""
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
            self._window.add(delivery.receipt, inf)  # its age counts from `begin`
        if isinstance(raw, RawRequest):
            self._on_request(replace(raw, delivery=delivery))
        elif delivery.receipt is not None:
            self._acknowledge(delivery.receipt)

    def _refuse_address(self, delivery: Delivery) -> None:
        """Refuse a request on a topic with an invalid name, and log the topic once."""
        request = peek_id(delivery.payload)
        refusal = self._decoder.topics_of(delivery.topic).misaddressed(delivery.topic, request or "unread")
        if refusal is None:
            return
        topic, error = refusal
        self._log.warn_once("misaddressed", delivery.topic, f"Refused a request on {delivery.topic}: {error}")
        with suppress(NetworkError):
            self._answers.publish(topic, encode_failure(request, error), 1)

    def _handle_state(self, state: State) -> None:
        """Report the connection's state; warn if the broker has lost the session."""
        if isinstance(state, Connected):
            if self._was_connected and not state.resumed and self._decoder.shared is None:
                self._log.log.warning(
                    "The broker lost the planner's session: requests sent between its restart and the planner's "
                    "reconnection may be lost; Hepti's clients send theirs again. See persistence in "
                    "docs/guide/broker.md."
                )
            self._was_connected, self._connected = True, state
        elif isinstance(state, Disconnected):
            self._connected = None
        self._on_state(state)

    def _acknowledge(self, receipt: Receipt) -> None:
        self._requests.acknowledge(receipt)
        self._window.remove(receipt)

    def _handle_published(self, answer: OutgoingAnswer, has_subscribers: bool) -> None:
        """Settle a published answer, or keep it for a resend if it had no subscriber."""
        assert answer.requests is not None
        now = time.monotonic()
        until_s = now + RESEND_FOR_S if answer.resend_until_s is None else answer.resend_until_s
        if has_subscribers or now > until_s:
            self.journal.settle(answer.requests)
            return
        for dropped in self._to_resend.put_undelivered(now + RESEND_S, replace(answer, resend_until_s=until_s)):
            client = dropped.reply.key.client
            self._log.warn_once("undelivered", client, f"Dropped answers of client {client}: it is subscribed to none.")
            self.journal.settle(dropped.requests or ())

    # -- any thread -------------------------------------------------------------------------------------------------

    def begin(self, raw: RawRequest) -> None:
        """Restart the age of a delivery, because a reader thread has begun to parse it."""
        if raw.delivery is not None and raw.delivery.receipt is not None:
            self._window.restart_age(raw.delivery.receipt, time.monotonic())

    def will_be_redelivered(self, raw: RawRequest) -> bool:
        """Return whether to drop a delivery, because the broker repeats it on this connection.

        An earlier connection received it, so it cannot be acknowledged.
        """
        receipt, connected = None if raw.delivery is None else raw.delivery.receipt, self._connected
        return (
            receipt is not None
            and connected is not None
            and connected.resumed
            and self._window.is_from_earlier(receipt)
        )

    def send(self, reply: Reply, requests: Sequence[RawRequest] | None = None) -> None:
        """Send an answer, and settle `requests` after its acknowledgement; None: the reply is a partial answer."""
        journal = self.journal
        journal.record_answering(requests or ())
        is_repeated = journal.was_answered(reply.key) if requests is None else journal.record_answer(reply.key)
        if is_repeated:
            reply = reply._replace(payload=b'{"repeated": true, ' + reply.payload.removeprefix(b"{"))
        self._publish(OutgoingAnswer(reply, requests))

    def resend_due(self, now: float) -> None:
        """Resend due answers, and probe the broker's limits once; now: from `time.monotonic`."""
        if now > self._probe_at_s:
            self._probe_at_s = inf
            probe = self._url, self._name, self._decoder.topics.probe("doctor"), self._log.log
            threading.Thread(target=warn_of_limits, args=probe, name="planner-broker-limits", daemon=True).start()
        self._look_for_lost(now)
        while (answer := self._to_resend.take_due(now)) is not None and self._publish(answer):
            continue

    @property
    def unacknowledged(self) -> int:
        """Return the number of unacknowledged requests at the broker."""
        return len(self._window)

    def _look_for_lost(self, now: float) -> None:
        """Warn of deliveries that were never acknowledged because of a fault of the planner."""
        if (old := self._window.older_than(now - LOST_S)) and (lost := old - self.journal.open_receipts()):
            for _ in lost - self._lost:
                self._log.record(
                    "unacknowledged",
                    f"{len(lost)} requests arrived {LOST_S:g} s ago and are neither answered nor waiting. They occupy "
                    "the broker's delivery window; restart the planner before the window is full.",
                )
            self._lost = lost

    def _publish(self, answer: OutgoingAnswer) -> bool:
        """Publish an answer, or keep it if the send queue is full; return whether it was published."""
        reply = answer.reply
        on_acknowledged = None if answer.requests is None else partial(self._handle_published, answer)
        try:
            self._answers.publish(reply.topic, reply.payload, 1, taken=on_acknowledged)
        except PacketLimitError as error:
            shorter = reply.as_error(error)
            if len(shorter.payload) < len(reply.payload):
                return self._publish(replace(answer, reply=shorter))
            self._log.record("unpublished", f"not published to {reply.topic}: {error}")
            self.journal.settle(answer.requests or ())  # even the error is too large: prevent a redelivery
        except NetworkError as error:
            if answer.requests is not None and not self._closed:  # the final answer repeats partial answers
                self._to_resend.put(time.monotonic() + RESEND_S, answer)
            self._log.record("unpublished", f"not published to {reply.topic}: {error}")
            return False
        return True
