"""One connection to a broker, from CONNECT to its loss: paho's client driven by our own poll loop on one thread.

paho's own threads are not used. Its loop selects (which fails on descriptors from 1024 on), a publish from another
thread may write to the socket in between, and reconnection has no jitter. Here only one thread touches the client, and
every attempt gets a fresh one, so nothing of a broken connection is left over.
"""

from __future__ import annotations

import select
import ssl
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final, Protocol

from paho.mqtt.client import Client, ConnectFlags, DisconnectFlags, MQTTMessage
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from hepti_mqtt.errors import NetworkError, RefusedError
from hepti_mqtt.transport.base import Will
from hepti_mqtt.transport.flow import Flow
from hepti_mqtt.transport.sockets import buffered, linger, local, no_delay, unacknowledged
from hepti_mqtt.transport.url import BrokerUrl
from hepti_mqtt.transport.wake import Wake

KEEPALIVE_S: Final = 10
STALLED_S: Final = 2 * KEEPALIVE_S  # as long as paho takes to find out
MISC_S: Final = 1.0
SESSION_EXPIRY_S: Final = 3600
MAX_INFLIGHT: Final = 20

Body = bytes | memoryview

_VERSIONS: Final = {4: "3.1.1", 5: "5"}
_WRONG_VERSION: Final = 132
_UNAVAILABLE: Final = frozenset({136, 137, 151, 156, 157, 159})  # server unavailable, busy, quota, moved, rate
_LEAVING: Final = frozenset({139, 142, 152})  # server shutting down, session taken over, administrative action
_FAILURE: Final = 128
_NOBODY: Final = 16  # no matching subscribers


class LinkLost(Exception):
    """The connection ended; the text says why."""


class HungUp(LinkLost):
    """The broker, or what lies between, closed the connection, and does not say that it has to."""


class VersionRefused(NetworkError):
    """The broker does not speak this version of MQTT: it says so, or it closes or keeps silent on our CONNECT."""


class Unanswered(VersionRefused):
    """The broker keeps silent on our CONNECT: it cannot read it, or is slow."""


class Listener(Protocol):
    """Who hears what arrives; called on the thread that drives the link."""

    def on_message(self, topic: str, payload: Body, qos: int, mid: int, repeated: bool, retained: bool = False) -> None:
        """A message arrived; mid: its packet id. repeated, retained: see `Delivery`."""
        ...

    def on_bad_topic(self) -> None:
        """A message arrived whose topic is not UTF-8."""
        ...

    def on_acknowledged(self, mid: int, refusal: str | None, heard: bool) -> None:
        """A QoS 1 publish was taken, or refused for a reason (MQTT 5); heard: False where nobody is subscribed."""
        ...

    def on_subscribed(self, mid: int, refusals: tuple[str | None, ...]) -> None:
        """A SUBSCRIBE was answered: for each filter None, or why it was refused."""
        ...


class Link:
    """One connection. `open` it, then `turn` until `LinkLost`; all methods on one thread.

    manual: what arrives at QoS 1 is not acknowledged until `acknowledge`. answer_s: wait no longer for the CONNACK once
    there is a connection, however long `open` may take.
    """

    def __init__(
        self,
        url: BrokerUrl,
        client_id: str,
        *,
        protocol: int,
        will: Will | None,
        clean: bool,
        listener: Listener,
        wake: Wake,
        manual: bool = False,
        answer_s: float = float("inf"),
    ) -> None:
        self.protocol = protocol
        self.largest_packet_bytes: int | None = None
        self.sending = nullcontext()  # no other thread sends through paho
        self.resumed = False  # the broker knew our session
        self.heard_at = float("-inf")  # when bytes came last
        self.window = MAX_INFLIGHT  # QoS 1 messages that may wait for their acknowledgement
        self._url, self._clean, self._listener, self._wake = url, clean, listener, wake
        self._connack: tuple[ReasonCode, Properties | None] | None = None
        self._reason, self._leaving = "", False
        self._reading = False
        self._answer_s, self._misc_at = answer_s, 0.0
        self._flow = Flow(time.monotonic())
        self._poll = select.poll()
        self._poll.register(wake.fileno(), select.POLLIN)
        self._polled: tuple[int, int] | None = None
        client = Client(
            CallbackAPIVersion.VERSION2,
            client_id=client_id,
            clean_session=clean if protocol == 4 else None,
            protocol=MQTTProtocolVersion(protocol),
            reconnect_on_failure=False,
            manual_ack=manual,
        )
        client.max_inflight_messages_set(0)  # our caller keeps the window; paho ignores the broker's word
        if url.user is not None:
            client.username_pw_set(url.user, url.password)
        context = url.ssl_context()
        if context is not None:
            client.tls_set_context(context)
        if will is not None:
            client.will_set(will.topic, will.payload, will.qos, will.retain)
        client.on_connect = self._on_connect
        client.on_disconnect = self._on_disconnect
        client.on_message = self._on_message
        client.on_publish = self._on_publish
        client.on_subscribe = self._on_subscribe
        client.on_socket_open = lambda _client, _data, sock: no_delay(sock)  # paho never does
        # With this callback set, paho queues and never writes on its own.
        client.on_socket_register_write = _nothing
        self._client = client

    def open(self, timeout_s: float, stop: Callable[[], bool]) -> None:
        """Connect and wait for the CONNACK; give up early if `stop()`.

        Raises NetworkError (nobody answers), RefusedError (credentials, client id) or VersionRefused.
        """
        deadline = time.monotonic() + timeout_s
        self._connect(timeout_s)
        deadline = min(deadline, time.monotonic() + self._answer_s)
        while self._connack is None:
            left = deadline - time.monotonic()
            if left <= 0 or stop():
                self.close()
                raise silent(self._url, self.protocol, min(timeout_s, self._answer_s))
            try:
                self.turn(left)
            except LinkLost as error:
                if self._connack is None:
                    raise hung_up(self._url, error) from error
        self._check_connack(*self._connack)

    @property
    def local(self) -> bool:
        """Return whether the broker is on this machine: no network lies between two ends of one address."""
        return local(self._client.socket())

    @property
    def busy(self) -> bool:
        """Return whether a packet is still being written."""
        return self._client.want_write()

    def turn(self, timeout_s: float) -> bool:
        """Wait for the socket or a wake-up, read and write; return whether it was woken. Raises `LinkLost`."""
        sock = self._client.socket()
        if sock is None:
            raise LinkLost(self._reason or "the socket is closed")
        self._watch(sock.fileno())
        wait_s = 0.0 if buffered(sock) else min(timeout_s, MISC_S)
        woken = readable = writable = False
        for fd, events in self._poll.poll(wait_s * 1000):
            if fd == self._wake.fileno():
                self._wake.clear()
                woken = True
            else:
                readable = bool(events & ~select.POLLOUT)  # hang-ups and errors show when reading
                writable = bool(events & select.POLLOUT)
        if readable or buffered(sock):
            self._read()
        if writable:
            self._flow.wrote()
            self.flush()
        self._keep_alive(time.monotonic())
        return woken

    def publish(self, topic: str, payload: bytes, qos: int, retain: bool) -> int:
        """Hand a message to paho, which queues it for `flush`; return its packet id."""
        while True:
            info = self._client.publish(topic, payload, qos, retain)
            # paho counts packet ids in a circle and refuses one that still waits for its acknowledgement.
            if info.rc != MQTTErrorCode.MQTT_ERR_QUEUE_SIZE:
                return info.mid

    def subscribe(self, filters: tuple[tuple[str, int], ...]) -> int:
        """Send a SUBSCRIBE; return its packet id."""
        if self.protocol == 5:
            _, mid = self._client.subscribe([(name, SubscribeOptions(qos=qos)) for name, qos in filters])
        else:
            _, mid = self._client.subscribe(list(filters))
        self.flush()
        if mid is None:
            raise LinkLost(self._reason or "the connection was lost")
        return mid

    def unsubscribe(self, filters: tuple[str, ...]) -> None:
        """Send an UNSUBSCRIBE."""
        self._client.unsubscribe(list(filters))
        self.flush()

    def acknowledge(self, mid: int) -> None:
        """Send the PUBACK of a message that has arrived at QoS 1."""
        self._client.ack(mid, 1)
        self.flush()

    def flush(self) -> None:
        """Write what the socket takes. Raises `LinkLost`."""
        if self._client.want_write():
            self._guarded(self._client.loop_write)

    def disconnect(self, timeout_s: float) -> None:
        """Say DISCONNECT, so that the broker drops the will, and close the socket."""
        deadline = time.monotonic() + timeout_s
        self._client.on_socket_close = lambda _client, _data, sock: linger(sock, deadline)
        self._client.disconnect()
        try:
            while self._client.socket() is not None and time.monotonic() < deadline:
                self.flush()
                if self._client.socket() is not None:
                    self.turn(max(deadline - time.monotonic(), 0.0))
        except LinkLost:
            return
        finally:
            self.close()

    def close(self) -> None:
        """Close the socket without a word, so that the broker publishes the will."""
        sock = self._client.socket()
        if sock is not None:
            sock.close()

    def _connect(self, timeout_s: float) -> None:
        self._client.connect_timeout = timeout_s
        try:
            if self.protocol == 5:
                properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
                if not self._clean:
                    properties.SessionExpiryInterval = SESSION_EXPIRY_S
                self._client.connect(
                    self._url.host, self._url.port, KEEPALIVE_S, clean_start=self._clean, properties=properties
                )
            else:
                self._client.connect(self._url.host, self._url.port, KEEPALIVE_S)
        except (OSError, UnicodeError) as error:
            raise absent(self._url, error) from error

    def _check_connack(self, reason: ReasonCode, properties: Properties | None) -> None:
        if not reason.is_failure:
            self.largest_packet_bytes = getattr(properties, "MaximumPacketSize", None)
            self.window = min(getattr(properties, "ReceiveMaximum", MAX_INFLIGHT), MAX_INFLIGHT)
            return
        self.close()
        place = self._url.place
        if reason.value == _WRONG_VERSION:
            raise VersionRefused(f"the broker at {place} does not speak MQTT {_VERSIONS[self.protocol]}")
        if reason.value in _UNAVAILABLE:
            raise NetworkError(f"the broker at {place} cannot take us now ({reason}); try again later")
        raise refused(self._url, str(reason))

    def _watch(self, fd: int) -> None:
        events = select.POLLIN | (select.POLLOUT if self._client.want_write() else 0)
        if self._polled == (fd, events):
            return
        if self._polled is not None and self._polled[0] != fd:
            self._poll.unregister(self._polled[0])
        self._poll.register(fd, events)
        self._polled = (fd, events)

    def _keep_alive(self, now: float) -> None:
        """Now and then let paho ping the broker, or give it up."""
        if now - self._misc_at < MISC_S:
            return
        self._misc_at = now
        self._flow.look(now, self.busy, unacknowledged(self._client.socket()) or 0)
        still_s = now - self._flow.moved_at
        if self.busy and still_s >= STALLED_S:
            self.close()
            raise LinkLost(f"the broker has taken nothing for {STALLED_S} s")
        # A PINGREQ would wait behind what is on its way, for longer than paho waits for the answer, and paho takes a
        # packet for sent only when all of it is.
        if not self._flow.waiting or (still_s >= KEEPALIVE_S and not self.busy):
            self._guarded(self._client.loop_misc, LinkLost)

    def _read(self) -> None:
        self._reading, self.heard_at = True, time.monotonic()
        try:
            self._guarded(self._client.loop_read)
        finally:
            self._reading = False

    def _guarded(self, step: Callable[[], MQTTErrorCode], lost: type[LinkLost] = HungUp) -> None:
        try:
            code = step()
        except Exception as error:  # paho raises struct.error, IndexError, ... on malformed packets
            self.close()
            raise LinkLost(f"the broker sent what paho cannot read: {error!r}") from error
        if code != MQTTErrorCode.MQTT_ERR_SUCCESS or self._client.socket() is None:
            self.close()
            lost = LinkLost if self._leaving else lost
            raise lost(self._reason or f"the connection was lost ({MQTTErrorCode(code).name})")

    def _on_connect(
        self, _client: Client, _data: Any, flags: ConnectFlags, reason: ReasonCode, properties: Properties | None
    ) -> None:
        self.resumed = flags.session_present
        self._connack = (reason, properties)

    def _on_disconnect(
        self, _client: Client, _data: Any, flags: DisconnectFlags, reason: ReasonCode, _properties: Properties | None
    ) -> None:
        if flags.is_disconnect_packet_from_server:
            self._reason = f"the broker closed the connection: {reason}"
            self._leaving = reason.value in _LEAVING

    def _on_message(self, _client: Client, _data: Any, message: MQTTMessage) -> None:
        try:
            topic = message.topic
        except UnicodeDecodeError:
            self._client.ack(message.mid, message.qos)  # or it would come again for ever, where we acknowledge
            self._listener.on_bad_topic()
            return
        payload = bytes(message.payload)  # no copy
        self._listener.on_message(topic, payload, message.qos, message.mid, message.dup, message.retain)

    def _on_publish(
        self, _client: Client, _data: Any, mid: int, reason: ReasonCode, _properties: Properties | None
    ) -> None:
        # paho also calls this when a QoS 0 packet is written; packet ids of those may repeat one that still waits.
        if self._reading:
            refusal = str(reason) if reason.value >= _FAILURE else None
            self._listener.on_acknowledged(mid, refusal, reason.value != _NOBODY)

    def _on_subscribe(
        self, _client: Client, _data: Any, mid: int, reasons: list[ReasonCode], _properties: Properties | None
    ) -> None:
        self._listener.on_subscribed(mid, tuple(str(r) if r.value >= _FAILURE else None for r in reasons))


def absent(url: BrokerUrl, error: Exception) -> NetworkError:
    """Return the error for a broker to which there is no connection."""
    if isinstance(error, ssl.SSLError):
        return NetworkError(
            f"TLS with the broker at {url.place} failed: {error}; name its authority with ?ca=FILE, or use mqtt:// if "
            "it does not encrypt"
        )
    return NetworkError(
        f"no broker answers at {url.place} ({error}); start one (`hepti broker`, or mosquitto) or name another "
        "with --broker or HEPTI_BROKER"
    )


def silent(url: BrokerUrl, protocol: int, timeout_s: float) -> Unanswered:
    """Return the error for a broker that does not answer our CONNECT."""
    return Unanswered(
        f"{url.place} accepts connections but does not answer as a broker of MQTT "
        f"{_VERSIONS[protocol]} within {timeout_s:.2g} s; check the port, and mqtt:// against mqtts://"
    )


def hung_up(url: BrokerUrl, error: LinkLost) -> VersionRefused:
    """Return the error for a broker that ends the connection instead of answering."""
    return VersionRefused(
        f"{url.place} closed the connection before answering ({error}); check the port, and mqtt:// against mqtts://"
    )


def refused(url: BrokerUrl, reason: str) -> RefusedError:
    """Return the error for a broker that does not let us in."""
    user = f"user {url.user!r}" if url.user else "a connection without user"
    return RefusedError(
        f"the broker at {url.place} refused {user}: {reason}; check user and password in the broker's URL"
    )


def _nothing(_client: Client, _data: Any, _sock: Any) -> None:
    return
