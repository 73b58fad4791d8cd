"""The processes of an embedded broker: its keeper, and amqtt.

    python -I -S child.py PARENT COMMAND ARGUMENT...                         run a command that ends with PARENT
    python -m hepti_mqtt.embedded_broker.child amqtt ADDRESS PORT [USERS]    run amqtt

PARENT is the caller's process id. The keeper ends the command if its standard input, a pipe from the caller, closes or
its parent process changes. The keeper imports nothing of Hepti, to start fast and use little memory.
USERS is a JSON file of user -> password; amqtt deletes it after reading. amqtt speaks MQTT 3.1.1 and is slow for
tensors.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_LOOK_S = 1.0
_GRACE_S = 3.0


def _die_with_keeper() -> None:
    if sys.platform == "linux":  # on other systems the command outlives a killed keeper
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch(child: subprocess.Popen[bytes], parent: int) -> None:
    poller = select.poll()
    poller.register(0, select.POLLIN)
    # A process forked by the parent may keep the pipe open after the parent's end.
    while os.getppid() == parent and not (poller.poll(_LOOK_S * 1000) and not os.read(0, 1)):
        continue
    child.terminate()
    try:
        child.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()


def keep(parent: int, command: list[str]) -> int:
    """Run `command` until it or the parent ends; return its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # preexec_fn is safe, because this process has only one thread yet.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_keeper)  # noqa: PLW1509
    signal.signal(signal.SIGTERM, lambda _signal, _frame: child.terminate())
    threading.Thread(target=_watch, args=(child, parent), daemon=True).start()
    return child.wait()


def _password_file(users: Path) -> Path:
    from pwdlib.hashers.argon2 import Argon2Hasher  # a dependency of amqtt

    hasher = Argon2Hasher()
    lines = [f"{user}:{hasher.hash(password)}\n" for user, password in json.loads(users.read_text()).items()]
    users.unlink()
    out = users.with_suffix(".passwd")
    with open(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.writelines(lines)
    return out


async def _serve_amqtt(address: str, port: int, users: Path | None) -> None:
    import asyncio

    from amqtt.broker import Broker

    class Payload(bytes):
        """A payload with a short repr: amqtt formats every message for a debug line, which doubled a tensor's time."""

        __repr__ = object.__repr__

    class Subscriptions(dict[str, Any]):
        """Iterates over a copy: amqtt awaits during iterations, and a new subscription would lose a message."""

        def __iter__(self) -> Any:
            return iter(list(self.keys()))

        def items(self) -> Any:
            return list(super().items())

    class SteadyBroker(Broker):  # type: ignore[misc]
        async def _broadcast_message(self, session: Any, topic: Any, data: Any, force_qos: int | None = None) -> None:
            await super()._broadcast_message(session, topic, data if data is None else Payload(data), force_qos)

        async def _publish_retained_messages_for_subscription(self, subscription: Any, session: Any) -> None:
            # amqtt sends a new connection the retained messages of all clients' subscriptions.
            if any(subscriber is session for subscriber, _ in self._subscriptions.get(subscription[0], ())):
                await super()._publish_retained_messages_for_subscription(subscription, session)

    name, options = (
        ("AnonymousAuthPlugin", {})
        if users is None
        else ("FileAuthPlugin", {"password_file": str(_password_file(users))})
    )
    place = f"[{address}]" if ":" in address else address
    broker = SteadyBroker(
        {
            "listeners": {"default": {"type": "tcp", "bind": f"{place}:{port}"}},
            "plugins": {f"amqtt.plugins.authentication.{name}": options},
        }
    )
    broker._subscriptions = Subscriptions()
    await broker.start()
    await asyncio.Event().wait()  # the keeper ends this process


if __name__ == "__main__":
    if sys.argv[1] == "amqtt":
        import asyncio
        import logging

        logging.disable(logging.WARNING)  # amqtt writes every payload into a debug line
        host, number, *users = sys.argv[2:]
        asyncio.run(_serve_amqtt(host, int(number), Path(users[0]) if users else None))
    else:
        sys.exit(keep(int(sys.argv[1]), sys.argv[2:]))
