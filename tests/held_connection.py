"""A relay between a process and the broker that can hold back what the process sends, as a slow uplink does."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

from hepti_mqtt.transport import BrokerUrl

CHUNK = 1 << 16


class Relay:
    """Listens at `url`, and passes bytes on both ways. Between `hold` and `release` none goes to the broker."""

    def __init__(self, broker: str) -> None:
        to = BrokerUrl.parse(broker)
        self._to = to.host, to.port
        self._open = threading.Event()
        self._open.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self._listener]
        self.url = f"mqtt://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self) -> None:
        """Hold back what the process sends."""
        self._open.clear()

    def release(self) -> None:
        """Let everything through, what was held back first."""
        self._open.set()

    def close(self) -> None:
        """End all connections."""
        self.release()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._to)
                for sock in (near, far):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets += [near, far]
                threading.Thread(target=self._pass, args=(near, far, True), daemon=True).start()
                threading.Thread(target=self._pass, args=(far, near, False), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, held: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK):
                if held:
                    self._open.wait()
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def relayed(broker: str) -> Iterator[Relay]:
    """Yield a relay to a broker."""
    relay = Relay(broker)
    try:
        yield relay
    finally:
        relay.close()
