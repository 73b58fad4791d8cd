"""Requests that the broker has handed over and waits for: beyond a number of them a small queue overflows."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from math import inf
from pathlib import Path
from typing import IO, Final

from hepti_mqtt.config.state import write_atomically
from hepti_mqtt.errors import HeptiError, NetworkError, PacketLimitError
from hepti_mqtt.runtime.coordinator.requests import Request, RequestKey
from hepti_mqtt.service.decoder import MessageDecoder, RawRequest
from hepti_mqtt.service.handler import Reply, RequestHandler, mark_repeated
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

# ----------------------------------------------------------------------------------------------------------------------
# Answers that go out again: nobody was subscribed to them, or there was no room for them.


UNHEARD: Final = 64  # that wait at once: each holds one of the requests that the broker hands over at most (512)
UNHEARD_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class OutgoingAnswer:
    """An answer on its way; on_acknowledged: what to do when the broker has it, None for a part of one.

    until_s: nobody need have heard it after; None until the broker has said for the first time that nobody did.
    """

    reply: Reply
    on_acknowledged: Callable[[], None] | None
    until_s: float | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes of its payload."""
        return len(self.reply.payload)


class UnacknowledgedAnswers:
    """Answers by the time when they go out again; all methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all that follows
        self._waiting: deque[tuple[float, OutgoingAnswer]] = deque()  # who is due first comes first
        self._nbytes = 0

    def has_room(self, answer: OutgoingAnswer) -> bool:
        """Return whether one more may wait because nobody heard it; of a large one this is alone."""
        with self._lock:
            few = len(self._waiting) < UNHEARD
            return few and (not self._waiting or self._nbytes + answer.nbytes <= UNHEARD_BYTES)

    def put(self, due_s: float, answer: OutgoingAnswer) -> None:
        """Keep an answer until it is due."""
        with self._lock:
            self._waiting.append((due_s, answer))
            self._nbytes += answer.nbytes

    def take_due(self, now: float) -> OutgoingAnswer | None:
        """Take out the first answer that is due, None if none is."""
        with self._lock:
            if not self._waiting or self._waiting[0][0] > now:
                return None
            _, answer = self._waiting.popleft()
            self._nbytes -= answer.nbytes
            return answer


# ----------------------------------------------------------------------------------------------------------------------
# The journal of requests: which deliveries the broker still keeps for us, and what was answered before.
#
# The broker keeps every request until it is acknowledged, and that happens when its answer is. So a planner that is
# killed meets the same requests again. A file beside the boot counter tells it which of them may have been answered
# already, and which it has met in life after life without an answer.


MAX_MARKS: Final = 4096  # marks of each kind
MAX_DELIVERY_ATTEMPTS: Final = 4  # of the planner that a request may outlive; the next one refuses it
FILE_BYTES: Final = 1 << 20  # then it is written anew, with what is kept
_MARK_BYTES: Final = 16
_ANSWERED: Final = b"A"
_MET_AGAIN: Final = b"M"
_ENDED: Final = b"E"  # an answer has ended what was met again

_log: Final = logging.getLogger("hepti.planner")

Waiting = tuple[RequestKey, bytes]  # a job, by its key and the digest of what was asked


class Journal:
    """What the planner knows of requests beyond its own life; all methods may be called from any thread.

    path: of the file. acknowledge: lets the broker forget a delivery. A file that cannot be written is logged once; the
    journal then knows of this life alone.
    """

    def __init__(self, path: Path, acknowledge: Callable[[Receipt], None]) -> None:
        self._path, self._acknowledge = path, acknowledge
        self._lock = threading.Lock()  # guards all that follows
        self._waiting: dict[Waiting, list[RawRequest]] = {}
        self._answered: OrderedDict[bytes, None] = OrderedDict()
        self._met: Counter[bytes] = Counter()
        self._met_now: set[bytes] = set()
        self._file: IO[bytes] | None = None
        self._read()
        self._rewrite()

    def name_for(self, asked: RawRequest) -> str:
        """Return a name for a request that brings none; the same one when the broker sends it again."""
        delivery = asked.delivery
        if delivery is None or delivery.receipt is None:
            return uuid.uuid4().hex
        packet = str(delivery.receipt.packet).encode()
        name = _mark(asked.model.encode(), asked.client.encode(), packet, asked.payload).hex()
        # The broker counts packet ids anew when it has forgotten a session.
        return uuid.uuid4().hex if not delivery.repeated and self.is_known(asked.model, asked.client, name) else name

    def count_attempts(self, asked: RawRequest) -> int:
        """Return how many lives of the planner have met a request again; those of this life count once."""
        if asked.delivery is None or not asked.delivery.repeated:
            return 0
        mark = _content(asked)
        with self._lock:
            if mark not in self._met_now:
                self._met_now.add(mark)
                self._met[mark] += 1
                self._append(_MET_AGAIN, mark)
            return self._met[mark]

    def record_waiting(self, asked: RawRequest, request: Request) -> None:
        """A request waits for its answer; one that came several times waits once."""
        with self._lock:
            self._waiting.setdefault((request.key, request.digest), []).append(asked)

    def settle_when_sent(self, request: Request) -> Callable[[], None]:
        """A request's answer goes out; return what to do when the broker has it."""
        with self._lock:
            asked = self._waiting.pop((request.key, request.digest), [])
        return lambda: self._settle(asked)

    def settle_refused(self, asked: RawRequest) -> Callable[[], None]:
        """A request is answered without waiting; return what to do when the broker has the answer."""
        return lambda: self._settle([asked])

    def is_known(self, model: str, client: str, request: str) -> bool:
        """Return whether a request waits, or may have been answered already."""
        key = RequestKey(model, client, request)
        with self._lock:
            return _mark_of(key) in self._answered or any(key == waiting for waiting, _ in self._waiting)

    def record_answer(self, key: RequestKey) -> bool:
        """Note that an answer goes out; return whether there may have been one before."""
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
        """Return whether there may have been an answer to a request already."""
        with self._lock:
            return _mark_of(key) in self._answered

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _settle(self, several: list[RawRequest]) -> None:
        for asked in several:
            if asked.delivery is None or asked.delivery.receipt is None:
                continue
            self._acknowledge(asked.delivery.receipt)
            if asked.delivery.repeated:
                mark = _content(asked)
                with self._lock:
                    self._met.pop(mark, None)
                    self._append(_ENDED, mark)

    def _read(self) -> None:
        try:
            data = self._path.read_bytes()
        except OSError:
            return
        size = 1 + _MARK_BYTES
        for at in range(0, len(data) - size + 1, size):  # the last one may be half there
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
        _log.warning("the journal of requests %s cannot be written: %s; make room there", self._path, error)


def _mark(*parts: bytes) -> bytes:
    found = blake2b(digest_size=_MARK_BYTES)
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.digest()


def _mark_of(key: RequestKey) -> bytes:
    return _mark(key.model.encode(), key.client.encode(), key.id.encode())


def _content(asked: RawRequest) -> bytes:
    return _mark(asked.model.encode(), asked.client.encode(), asked.payload)


# ----------------------------------------------------------------------------------------------------------------------
# Requests and answers: a connection that brings requests, and the answers by which the broker may forget them.


LOOK_S: Final = 5.0  # after the start, which nothing should hold up
CLOSED_S: Final = 0.5  # for the last acknowledgements
RESEND_S: Final = 0.5  # between two tries of an answer to which nobody was subscribed ...
RESEND_FOR_S: Final = 20.0  # ... for so long: a broker that was killed has forgotten who reads what, and they come back
RETAINED: Final = 64  # topics with retained requests that are told of


class RequestChannel:
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
        desk: RequestHandler,
        decoder: MessageDecoder,
        asked: Callable[[RawRequest], None],
        changed: OnState,
        log: logging.Logger,
    ) -> None:
        self._answers, self._desk, self._decoder, self._asked, self._log = answers, desk, decoder, asked, log
        self._tell, self._met = changed, False
        self._stands: Connected | None = None  # the connection that brings requests
        self._window = DeliveryWindow(self._handle_overflow)
        self._url, self._name, self._look_s = url, name, time.monotonic() + LOOK_S
        self._requests = PahoTransport(
            url,
            f"{name}-requests",
            on_message=lambda _topic, _payload: None,
            on_delivery=self.handle_delivery,
            on_state=self._changed,
            clean=False,
            name="planner-requests",
        )
        self._journal = Journal(place, self._acknowledge)
        self._unheard = UnacknowledgedAnswers()
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

    def handle_delivery(self, delivery: Delivery) -> None:
        """Take a request from the broker, on the network thread."""
        asked = None if delivery.retained else self._decoder.decode(delivery.topic, delivery.payload)
        if delivery.retained:
            self._retained(delivery.topic)
        if delivery.receipt is not None:
            self._window.opened(delivery.receipt)
        if isinstance(asked, RawRequest):
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
                    "back, before the planner was, are lost; see persistence in docs/guide/broker.md"
                )
            self._met, self._stands = True, state
        elif isinstance(state, Disconnected):
            self._stands = None
        self._tell(state)

    def _acknowledge(self, receipt: Receipt) -> None:
        self._requests.acknowledge(receipt)
        self._window.closed(receipt)

    def _handle_overflow(self) -> None:
        self._log.warning("the broker may have dropped requests: more came at once than it keeps, see `hepti doctor`")
        self._announce()

    def _announce(self) -> None:
        """Say that we are there once more: clients that wait then send again what the broker may have dropped."""
        if (stands := self._stands) is not None:  # else it is said when it stands again
            self._tell(stands)

    def _probe_broker(self) -> None:
        """Find out what the broker takes and keeps."""
        room = warn_of_limits(self._url, self._name, self._decoder.topics.probe("doctor"), self._log)
        if room is not None:
            self._window.limit = room.in_flight
            self._announce()

    # -- any thread -------------------------------------------------------------------------------------------------

    def name(self, asked: RawRequest) -> str:
        """Return the name of a request, if it brings none."""
        return self._journal.name_for(asked)

    def exceeded_attempts(self, asked: RawRequest) -> str | None:
        """Return why a request is not taken once more, None if it is."""
        if (lives := self._journal.count_attempts(asked)) <= MAX_DELIVERY_ATTEMPTS:
            return None
        return f"the planner has been lost {lives} times with this request; see its log, and ask for less at once"

    def record_waiting(self, asked: RawRequest, request: Request) -> None:
        """A request waits for its answer."""
        self._journal.record_waiting(asked, request)

    def refuse_unread(self, asked: RawRequest, error: HeptiError) -> None:
        """Answer a request that is not even read."""
        self.send_reply(
            asked, self._desk.refuse_unread(asked.model, asked.client, asked.payload, error, self.name(asked))
        )

    def send_reply(self, asked: RawRequest, reply: Reply) -> None:
        """Answer a request that did not wait."""
        self._send_final(
            RequestKey(asked.model, asked.client, reply.request_id), reply, self._journal.settle_refused(asked)
        )

    def send_answer(self, request: Request, reply: Reply) -> None:
        """Answer a request that has waited."""
        self._send_final(request.key, reply, self._journal.settle_when_sent(request))

    def send_part(self, request: Request, reply: Reply) -> None:
        """Send a part of an answer."""
        self._send(mark_repeated(reply) if self._journal.was_answered(request.key) else reply)

    def resend_due(self, now: float) -> None:
        """Send those answers again that nobody has heard, or that found no room; now: by `time.monotonic`."""
        if now > self._look_s:
            self._look_s = inf
            threading.Thread(target=self._probe_broker, name="planner-room", daemon=True).start()
        while (answer := self._unheard.take_due(now)) is not None and self._publish(answer):
            continue

    def _send_final(self, key: RequestKey, reply: Reply, taken: Callable[[], None]) -> None:
        """Send the last word on a request; when the broker has it, it need not keep the request any longer."""
        self._send(mark_repeated(reply) if self._journal.record_answer(key) else reply, taken)

    def _send(self, reply: Reply, taken: Callable[[], None] | None = None) -> None:
        self._publish(OutgoingAnswer(reply, taken))

    def _publish(self, answer: OutgoingAnswer) -> bool:
        """Send an answer, or keep it until there is room; return whether there was."""
        reply = answer.reply
        try:
            self._answers.publish(
                reply.topic,
                reply.payload,
                1,
                taken=None if answer.on_acknowledged is None else partial(self._handle_taken, answer),
            )
        except PacketLimitError as error:
            shorter = self._desk.encode_too_large(reply, error)
            if len(shorter.payload) < len(reply.payload):
                return self._publish(replace(answer, reply=shorter))
            self._unpublished(reply, error)
            if answer.on_acknowledged is not None:
                answer.on_acknowledged()  # not even that error gets through, and the request would come again for ever
        except NetworkError as error:
            self._no_room(answer, error)
            return False
        return True

    def _no_room(self, answer: OutgoingAnswer, error: NetworkError) -> None:
        """Keep an answer for later, unless we are closed; of a part the whole answer tells."""
        if answer.on_acknowledged is not None and not self._closed:
            self._unheard.put(time.monotonic() + RESEND_S, answer)
        self._unpublished(answer.reply, error)

    def _unpublished(self, reply: Reply, error: NetworkError) -> None:
        self._decoder.counters["unpublished"] += 1
        count = self._decoder.counters["unpublished"]
        if count & (count - 1) == 0:  # each is tried again, so that the log would be full of it
            self._log.warning("not published to %s: %s (%d so far)", reply.topic, error, count)

    def _handle_taken(self, answer: OutgoingAnswer, heard: bool) -> None:
        """The broker has an answer, on the network thread."""
        now = time.monotonic()
        until_s = now + RESEND_FOR_S if answer.until_s is None else answer.until_s
        if heard or now > until_s or not self._unheard.has_room(answer):
            assert answer.on_acknowledged is not None
            answer.on_acknowledged()
        else:
            self._unheard.put(now + RESEND_S, replace(answer, until_s=until_s))
