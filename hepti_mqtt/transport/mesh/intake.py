"""What one connection to an endpoint receives: where the next bytes go, and what has come with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from hepti_mqtt.transport.mesh.buffers import Buffers
from hepti_mqtt.transport.mesh.filters import is_topic
from hepti_mqtt.transport.mesh.packets import PUBLISH, Malformed, fixed_header

STAGE: Final = 4096  # read first, to see what comes; the rest of a larger payload goes where it belongs
MAX_TOPICS, MAX_HEAD = 4096, 1024  # topics remembered; the longest topic or control packet in bytes
# First byte, length and length of the topic of a PUBLISH lie in so many bytes, which say where its topic and payload
# lie: those of frames that come with every request are read once.
LEAD, MAX_LEADS = 7, 256
_NOTHING: Final = memoryview(b"")

OnPublish = Callable[[str, memoryview], None]
OnControl = Callable[[int, bytes], None]


class Intake:
    """Reads the packets of one connection: receive into `room()`, then say how much came with `took`.

    missing: bytes of the payload on its way that have not come yet. limit_bytes: the largest packet.
    """

    def __init__(self, buffers: Buffers, on_publish: OnPublish, on_control: OnControl, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.missing = 0
        self._buffers, self._on_publish, self._on_control = buffers, on_publish, on_control
        self._stage = memoryview(bytearray(STAGE))
        self._start = self._end = 0  # what of the stage is not parsed
        self._topics: dict[bytes, str] = {}
        self._leads: dict[bytes, tuple[int, int, int]] = {}
        self._topic, self._payload = "", _NOTHING

    def room(self) -> memoryview:
        """Return where to receive: the rest of a payload and nothing beyond it, or the stage."""
        if self.missing:
            return self._payload[-self.missing :]
        left = self._end - self._start
        if self._start:
            self._stage[:left] = self._stage[self._start : self._end]
            self._start, self._end = 0, left
        return self._stage[left:]

    def took(self, nbytes: int) -> None:
        """Parse what came into the room. Raises Malformed."""
        if self.missing:
            self.missing -= nbytes
            if not self.missing:
                payload, self._payload = self._payload, _NOTHING  # a view that is kept would keep the buffer
                self._on_publish(self._topic, payload)
            return
        self._end += nbytes
        while not self.missing and self._parse():
            pass

    def _parse(self) -> bool:
        """Take one packet, or the beginning of a PUBLISH, from the stage; return whether there was one."""
        stage, start, end = self._stage, self._start, self._end
        if end - start >= LEAD:
            known = self._leads.get(bytes(stage[start : start + LEAD]))
            if known is not None and known[2] <= self.limit_bytes:
                return self._begin(start + known[0], start + known[1], start + known[2])
        header = fixed_header(stage, start, end, self.limit_bytes)
        if header is None:
            return False
        first, at, length = header
        if first == PUBLISH:
            return self._unknown(at, length)
        if length > MAX_HEAD:
            raise Malformed(f"packet {first:#x} of {length} bytes")
        if end < at + length:
            return False
        self._start = at + length
        self._on_control(first, bytes(stage[at : at + length]))
        return True

    def _unknown(self, at: int, length: int) -> bool:
        """Check where topic and payload of a PUBLISH lie whose body starts at `at`, and take their beginning."""
        stage, first, end = self._stage, self._start, self._end
        if length < 2:
            raise Malformed("a PUBLISH without a topic")
        if end < at + 2:
            return False
        start = at + 2 + (stage[at] << 8 | stage[at + 1])
        if start > at + min(length, MAX_HEAD):
            raise Malformed("a topic longer than its packet, or too long")
        if end - first >= LEAD:
            if len(self._leads) >= MAX_LEADS:
                self._leads.clear()
            self._leads[bytes(stage[first : first + LEAD])] = (at + 2 - first, start - first, at + length - first)
        return self._begin(at + 2, start, at + length)

    def _begin(self, name_at: int, start: int, stop: int) -> bool:
        """Take the topic and the first bytes of a payload that lies from `start` to `stop`; False without its topic."""
        stage, end = self._stage, self._end
        if end < start:
            return False
        name = bytes(stage[name_at:start])
        self._topic = self._topics.get(name) or self._new_topic(name)
        payload = self._buffers.take(stop - start)
        if end >= stop:
            payload[:] = stage[start:stop]
            self._start = stop
            self._on_publish(self._topic, payload)
        else:
            payload[: end - start] = stage[start:end]
            self._start, self._payload, self.missing = end, payload, stop - end
        return True

    def _new_topic(self, name: bytes) -> str:
        try:
            topic = name.decode()
        except UnicodeDecodeError:
            raise Malformed("a topic that is not UTF-8") from None
        if not is_topic(topic):
            raise Malformed(f"a topic {topic[:64]!r}")
        if len(self._topics) >= MAX_TOPICS:
            self._topics.clear()
        self._topics[name] = topic
        return topic
