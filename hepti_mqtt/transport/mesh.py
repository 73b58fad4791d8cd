"""Tensors from device to device without a broker: one device's endpoint and its subscriptions at peers."""

from __future__ import annotations

import dataclasses
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from hepti_mqtt.protocol import messages
from hepti_mqtt.transport.buffers import Buffers
from hepti_mqtt.transport.channels import Channels
from hepti_mqtt.transport.endpoint import Endpoint
from hepti_mqtt.transport.peer import NEVER, Callbacks, Dropped, MeshEvent, Peer, PeerStats
from hepti_mqtt.transport.sockets import MeshTls, Wake

QUEUE_BYTES: Final = 32 << 20  # default limit of a subscriber's queue
PACKET_BYTES: Final = 32 << 20  # default limit of a packet from a peer
TICK_S: Final = 1.0
LEAST_WAIT_S: Final = 1e-4  # shortest wait for a payload that counts as a measurement of the link
_MAX_PEERS: Final = 1024

OnMessage = Callable[[str, str, memoryview], None]
OnEvent = Callable[[MeshEvent], None]


class Mesh:
    """Exchanges tensors between devices over MQTT without a broker.

    One thread, the session's, calls all methods except `wake`; `wait` calls on_message(peer, topic, payload) and
    on_event. A payload is aligned to 64 bytes; its memory is reused after the last reference is gone.
    A helper thread accepts subscribers and flushes queues.
    user: this device's name for logins. limit_bytes: of a subscriber's queue. tls: encrypt both directions.
    Raises OSError if the address cannot be used.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        user: str,
        on_message: OnMessage,
        on_event: OnEvent,
        limit_bytes: int = QUEUE_BYTES,
        tls: MeshTls | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_message, self._on_event, self._limit_bytes = on_message, on_event, limit_bytes
        self._stats: dict[str, PeerStats] = {}
        # Created first, because it may raise.
        self._endpoint = Endpoint(
            host, port, clock=clock, stats_of=self._stats_of, on_drop=self._dropped, secure=tls.serve if tls else None
        )
        self.port = self._endpoint.port
        #: Sends one message (topic, C-contiguous parts); see `Endpoint.publish`. `Dropped` reports a full queue.
        self.publish: Callable[..., int] = self._endpoint.publish
        #: Ends a grant (user, key); disconnects the user after its last grant.
        self.expel: Callable[[str, Hashable], None] = self._endpoint.expel
        self._peers: dict[str, Peer] = {}
        self._due = NEVER  # the peers' earliest timer
        self._by_fd: dict[int, Peer] = {}
        self._receiving: list[Peer] = []  # peers with an incomplete payload
        self._eager: list[Peer] = []  # peers that stopped before the end of the available bytes
        # Messages and events for `wait` to report, in order of arrival.
        self._reported: deque[MeshEvent | tuple[str, str, memoryview]] = deque()
        self._epoll = select.epoll()
        self._wake = Wake()
        self.wake = self._wake.set  #: ends `wait`; any thread may call it, also after `close`
        self._epoll.register(self._wake.fileno(), select.EPOLLIN)
        self.channels = Channels(self._endpoint, self._peers, self._wake.fileno(), self._stats_of)
        self._clock = clock
        self._callbacks = Callbacks(
            user=user,
            clock=clock,
            watch=self._watch,
            timed=self._timed,
            tell=self._reported.append,
            hear=self._reported.append,
            again=self._eager.append,
            buffers=Buffers(),
            secure=tls.ask if tls else None,
        )
        self.woke_s = 0.0  #: when `wait` last ended its wait, by `time.perf_counter`
        self._stopping = False
        self._helper = threading.Thread(target=self._help, name="mesh-helper", daemon=True)
        self._helper.start()

    def admit(
        self, user: str, key: Hashable, token: str, filters: Sequence[str], limit_bytes: int | None = None
    ) -> None:
        """Grant: `user` may log in with this token and read these filters until `expel`; limit_bytes: of its queue."""
        self._endpoint.admit(user, key, token, filters, limit_bytes or self._limit_bytes)

    def join(
        self,
        peer: str,
        key: Hashable,
        address: messages.Endpoint,
        token: str,
        filters: Sequence[str],
        limit_bytes: int = PACKET_BYTES,
    ) -> None:
        """Subscribe at a peer's endpoint until `leave`; `Joined` reports success, also after a reconnection.

        All keys share one connection. limit_bytes: of the largest packet.
        """
        subscription = self._peers.get(peer)
        if subscription is None:
            subscription = self._peers[peer] = Peer(peer, address, self._stats_of(peer), self._callbacks)
        subscription.join(key, address, token, filters, limit_bytes)

    def leave(self, peer: str, key: Hashable) -> None:
        """End the subscriptions of a key at a peer, and close the connection after the last key."""
        subscription = self._peers.get(peer)
        if subscription is not None and not subscription.leave(key):
            del self._peers[peer]

    def wait(self, timeout_s: float | None) -> None:
        """Wait for bytes, `wake`, a timer or the timeout; report messages and events."""
        if self._reported or self._eager:
            timeout_s = 0.0
        elif self._due < NEVER:
            timeout_s = min(max(self._due - self._clock(), 0.0), NEVER if timeout_s is None else timeout_s)
        began_s, entered_s = self.woke_s, time.perf_counter()
        receiving = any(peer.missing for peer in self._receiving)
        ready = self._epoll.poll(timeout_s)
        self.woke_s = time.perf_counter()
        waited_s = self.woke_s - entered_s
        # The link limited the transfer if this thread waited longer than it worked.
        timed = receiving and waited_s > max(entered_s - began_s, LEAST_WAIT_S)
        peers = [peer for fd, _ in ready if (peer := self._by_fd.get(fd)) is not None]
        before = sum(peer.received_bytes for peer in peers) if timed else 0
        for peer in peers:
            peer.ready()
        if timed and peers:
            nbytes = sum(peer.received_bytes for peer in peers) - before
            for peer in peers:
                peer.stats.timed_bytes += nbytes
                peer.stats.timed_us += round(1e6 * (self.woke_s - began_s))
        if peers:
            self._receiving = [peer for peer in {*self._receiving, *peers} if peer.missing]
        if len(peers) < len(ready):
            self._wake.clear()
        if self._eager:
            eager, self._eager[:] = list(self._eager), []
            for peer in eager:
                peer.ready()
        # Timers run after reads, because an answer may have arrived while this thread was busy.
        if self._due < NEVER and self._due <= self._clock():
            for peer in self._peers.values():
                peer.timer()
        reported = self._reported
        while reported:
            each = reported.popleft()
            if isinstance(each, tuple):
                self._on_message(*each)
            else:
                self._on_event(each)

    def call_before_waiting(self, leave_off: Callable[[], None]) -> None:
        """Set a callback for threads that are about to wait for the holder of `channels`."""
        self._endpoint.lock.on_wait = leave_off

    def stats(self) -> Mapping[str, PeerStats]:
        """Return the counters and queued bytes of each peer."""
        queued = self._endpoint.queued_bytes()
        return {
            name: dataclasses.replace(stats, queued_bytes=queued.get(name, 0))
            for name, stats in list(self._stats.items())
        }

    def close(self) -> None:
        """Close every connection."""
        self._stopping = True
        self._endpoint.stop()
        self._helper.join()
        for peer in self._peers.values():
            peer.close()
        self._endpoint.close()
        self._epoll.close()
        self._wake.close()

    def _timed(self) -> None:
        self._due = min((peer.due for peer in self._peers.values()), default=NEVER)

    def _watch(self, fd: int, events: int, peer: Peer) -> None:
        if not events:
            del self._by_fd[fd]
            with suppress(OSError):  # a failed TLS handshake has closed it
                self._epoll.unregister(fd)
        elif fd in self._by_fd:
            self._epoll.modify(fd, events)
        else:
            self._by_fd[fd] = peer
            self._epoll.register(fd, events)

    def _stats_of(self, name: str) -> PeerStats:
        """Return the counters of a peer, which outlive its connections."""
        if name not in self._stats and len(self._stats) >= _MAX_PEERS:
            self._stats.pop(next(iter(self._stats)))
        return self._stats.setdefault(name, PeerStats())

    def _dropped(self, user: str, nbytes: int) -> None:
        self._reported.append(Dropped(user, nbytes))
        self.wake()

    def _help(self) -> None:
        while not self._stopping:
            self._endpoint.turn(TICK_S if self._endpoint.busy() else None)
            self._endpoint.tick(self._clock())
