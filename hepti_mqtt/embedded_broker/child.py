"""The processes of an embedded broker: its keeper, and amqtt.

    python -I -S child.py PARENT COMMAND ARGUMENT...                         run a command that ends with PARENT
    python -m hepti_mqtt.embedded_broker.child amqtt ADDRESS PORT [USERS]    run amqtt

PARENT is the process id of the caller, which holds the other end of standard input. When that closes, or the keeper is
another process's child, the command is ended. The keeper imports nothing of Hepti, to start fast and stay small.
USERS is a JSON file of user -> password, deleted once read. amqtt speaks MQTT 3.1.1 and is slow for tensors.
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
    if sys.platform == "linux":  # elsewhere nothing ends the command if the keeper itself is killed
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch(child: subprocess.Popen[bytes], parent: int) -> None:
    poller = select.poll()
    poller.register(0, select.POLLIN)
    # A process forked by the parent may hold the pipe open after the parent's death.
    while os.getppid() == parent and not (poller.poll(_LOOK_S * 1000) and not os.read(0, 1)):
        continue
    child.terminate()
    try:
        child.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()


def keep(parent: int, command: list[str]) -> int:
    """Run `command` until it ends or the parent does; return its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # This process has one thread so far, so that preparing the child between fork and exec is safe.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_keeper)  # noqa: PLW1509
    signal.signal(signal.SIGTERM, lambda _signal, _frame: child.terminate())
    threading.Thread(target=_watch, args=(child, parent), daemon=True).start()
    return child.wait()


def _password_file(users: Path) -> Path:
    from pwdlib.hashers.argon2 import Argon2Hasher  # comes with amqtt

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
        """amqtt formats every message for a debug line that nobody reads: twice the time of a tensor."""

        __repr__ = object.__repr__

    class Subscriptions(dict[str, Any]):
        """amqtt awaits while it iterates over them: one made meanwhile would lose a message."""

        def __iter__(self) -> Any:
            return iter(list(self.keys()))

        def items(self) -> Any:
            return list(super().items())

    class SteadyBroker(Broker):  # type: ignore[misc]
        async def _broadcast_message(self, session: Any, topic: Any, data: Any, force_qos: int | None = None) -> None:
            await super()._broadcast_message(session, topic, data if data is None else Payload(data), force_qos)

        async def _publish_retained_messages_for_subscription(self, subscription: Any, session: Any) -> None:
            # A new connection is sent what is retained for anybody's subscriptions; only its own are right.
            if any(one is session for one, _ in self._subscriptions.get(subscription[0], ())):
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
    await asyncio.Event().wait()  # until the keeper ends this process


if __name__ == "__main__":
    if sys.argv[1] == "amqtt":
        import asyncio
        import logging

        logging.disable(logging.WARNING)  # amqtt formats every payload into a debug line
        host, number, *users = sys.argv[2:]
        asyncio.run(_serve_amqtt(host, int(number), Path(users[0]) if users else None))
    else:
        sys.exit(keep(int(sys.argv[1]), sys.argv[2:]))
