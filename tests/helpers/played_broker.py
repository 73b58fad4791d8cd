"""A broker that a test plays."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading

from mqtt_bytes import Reader
from programs import PATIENCE_S

from hepti_mqtt.transport.codec import (
    FROM_BROKER,
    FROM_STRANGER,
    FROM_SUBSCRIBER,
    Connack,
    Connect,
    Disconnect,
    Pingreq,
    Pingresp,
    Puback,
    Publish,
    Suback,
    Subscribe,
    encode,
)

READS = {**FROM_BROKER, **FROM_SUBSCRIBER, **FROM_STRANGER}


def usual(event):
    """Return the answer of a broker that takes everything; None hangs up."""
    match event:
        case Connect():
            return Connack(0)
        case Subscribe(packet_id, filters):
            return Suback(packet_id, b"\1" * len(filters))
        case Publish(packet_id=packet_id) if packet_id:
            return Puback(packet_id)
        case Pingreq():
            return Pingresp()
        case Disconnect():
            return None
    return b""


class PlayedBroker:
    """Serves one connection after the other; answer(event, connection): a packet, bytes, or None to hang up."""

    def __init__(self, answer):
        self.answer, self.heard, self.socks = answer, queue.SimpleQueue(), []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"mqtt://u:s3cret@127.0.0.1:{self.listener.getsockname()[1]}"
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self):
        with contextlib.suppress(OSError):
            while True:
                self.socks.append(self.listener.accept()[0])
                with self.socks[-1] as sock:
                    with contextlib.suppress(ConnectionError):
                        self.talk(sock, len(self.socks) - 1)
                    self.heard.put((len(self.socks) - 1, None))

    def talk(self, sock, connection):
        reader = Reader(READS)
        while data := sock.recv(65_536):
            reader.put(data)
            events, reader.heard = reader.heard, []
            for event in events:
                if isinstance(event, Connect):
                    reader.decoder.version = event.version
                self.heard.put((connection, event))
                said = self.answer(event, connection)
                if said is None:
                    return
                sock.sendall(said if isinstance(said, bytes) else encode(said, reader.decoder.version))

    def next(self, kind):
        """Return the next (connection, event) of a kind; None is the end of a connection."""
        while not isinstance((heard := self.heard.get(timeout=PATIENCE_S))[1], kind):
            continue
        return heard

    def cut(self):
        """Break the connection."""
        with contextlib.suppress(OSError):
            self.socks[-1].shutdown(socket.SHUT_RDWR)

    def close(self):
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        if self.socks:
            self.cut()
        self.thread.join(PATIENCE_S)
