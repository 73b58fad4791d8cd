"""The journal of requests: which deliveries the broker still keeps for us, and what was answered before.

The broker keeps every request until it is acknowledged, and that happens when its answer is. So a planner that is
killed meets the same requests again. A file beside the boot counter tells it which of them may have been answered
already, and which it has met in life after life without an answer.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import IO, Final

from hepti_mqtt.config.state import write_atomically
from hepti_mqtt.runtime.planner.flight import Job, RequestKey
from hepti_mqtt.service.inbox import Asked
from hepti_mqtt.transport import Receipt

KEPT: Final = 4096  # marks of each kind
LIVES: Final = 4  # of the planner that a request may outlive; the next one refuses it
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
        self._waiting: dict[Waiting, list[Asked]] = {}
        self._answered: OrderedDict[bytes, None] = OrderedDict()
        self._met: Counter[bytes] = Counter()
        self._met_now: set[bytes] = set()
        self._file: IO[bytes] | None = None
        self._read()
        self._write_anew()

    def name(self, asked: Asked) -> str:
        """Return a name for a request that brings none; the same one when the broker sends it again."""
        delivery = asked.delivery
        if delivery is None or delivery.receipt is None:
            return uuid.uuid4().hex
        packet = str(delivery.receipt.packet).encode()
        name = _mark(asked.model.encode(), asked.client.encode(), packet, asked.payload).hex()
        # The broker counts packet ids anew when it has forgotten a session.
        return uuid.uuid4().hex if not delivery.repeated and self.known(asked.model, asked.client, name) else name

    def lives(self, asked: Asked) -> int:
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

    def wait(self, asked: Asked, job: Job) -> None:
        """A request waits for its answer; one that came several times waits once."""
        with self._lock:
            self._waiting.setdefault((job.key, job.digest), []).append(asked)

    def over(self, job: Job) -> Callable[[], None]:
        """A request's answer goes out; return what to do when the broker has it."""
        with self._lock:
            asked = self._waiting.pop((job.key, job.digest), [])
        return lambda: self._settle(asked)

    def turned_away(self, asked: Asked) -> Callable[[], None]:
        """A request is answered without waiting; return what to do when the broker has the answer."""
        return lambda: self._settle([asked])

    def known(self, model: str, client: str, request: str) -> bool:
        """Return whether a request waits, or may have been answered already."""
        key = RequestKey(model, client, request)
        with self._lock:
            return _mark_of(key) in self._answered or any(key == waiting for waiting, _ in self._waiting)

    def answer(self, key: RequestKey) -> bool:
        """Note that an answer goes out; return whether there may have been one before."""
        mark = _mark_of(key)
        with self._lock:
            before = mark in self._answered
            self._answered[mark] = None
            self._answered.move_to_end(mark)
            if len(self._answered) > KEPT:
                self._answered.popitem(last=False)
            if not before:
                self._append(_ANSWERED, mark)
            return before

    def answered(self, key: RequestKey) -> bool:
        """Return whether there may have been an answer to a request already."""
        with self._lock:
            return _mark_of(key) in self._answered

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _settle(self, several: list[Asked]) -> None:
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

    def _write_anew(self) -> None:
        answered = list(self._answered)[-KEPT:]
        met = [mark for mark, times in self._met.most_common(KEPT) for _ in range(min(times, LIVES))]
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
            self._write_anew()

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
    return _mark(key.model.encode(), key.client.encode(), key.request.encode())


def _content(asked: Asked) -> bytes:
    return _mark(asked.model.encode(), asked.client.encode(), asked.payload)
