"""A TCP connection to a broker that a test can cut, stop or encrypt."""

from __future__ import annotations

import contextlib
import socket
import threading

from programs import PATIENCE_S


class Relay:
    """A relay to a broker, by TLS if given: `cut` breaks connections, `refusing` new ones; reads while `flowing`."""

    def __init__(self, target_port, tls=None):
        self.target_port, self.tls = target_port, tls
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.url = f"mqtt://127.0.0.1:{self.port}"
        self.refusing = False
        self.flowing = threading.Event()
        self.flowing.set()
        self.pairs = []
        self.threads = []
        self.spawn(self.accept)

    def spawn(self, target, *arguments):
        self.threads.append(threading.Thread(target=target, args=arguments, daemon=True))
        self.threads[-1].start()

    def accept(self):
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            if self.refusing:
                near.close()
                continue
            try:
                if self.tls is not None:
                    near = self.tls.wrap_socket(near, server_side=True)
                far = socket.create_connection(("127.0.0.1", self.target_port))
            except OSError:
                near.close()
                continue
            for sock in (near, far):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.pairs.append((near, far))
            self.spawn(self.relay, near, far)
            self.spawn(self.relay, far, near)

    def relay(self, source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                self.flowing.wait()
                target.sendall(data)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def cut(self):
        for pair in self.pairs:
            for sock in pair:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self):
        self.flowing.set()
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.cut()
        for thread in self.threads:
            thread.join(PATIENCE_S)
        for pair in self.pairs:
            for sock in pair:
                sock.close()
