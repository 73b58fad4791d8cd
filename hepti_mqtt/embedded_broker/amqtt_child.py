"""The amqtt broker as a process of its own: `python -m hepti_mqtt.embedded_broker.amqtt_child ADDRESS PORT [USERS]`.

USERS is a JSON file of user -> password, deleted once read. amqtt speaks MQTT 3.1.1 and is slow for tensors: the last
resort.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any


def configuration(address: str, port: int, users: Path | None) -> dict[str, Any]:
    """Return amqtt's configuration: one listener, and who may use it."""
    plugins: dict[str, Any] = {}
    if users is None:
        plugins["amqtt.plugins.authentication.AnonymousAuthPlugin"] = {"allow_anonymous": True}
    else:
        plugins["amqtt.plugins.authentication.FileAuthPlugin"] = {"password_file": str(_password_file(users))}
    return {"listeners": {"default": {"type": "tcp", "bind": f"{address}:{port}"}}, "plugins": plugins}


def _password_file(users: Path) -> Path:
    from pwdlib.hashers.argon2 import Argon2Hasher  # comes with amqtt

    hasher = Argon2Hasher()
    lines = [f"{user}:{hasher.hash(password)}\n" for user, password in json.loads(users.read_text()).items()]
    users.unlink()
    out = users.with_suffix(".passwd")
    with open(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.writelines(lines)
    return out


async def _serve(address: str, port: int, users: Path | None) -> None:
    from amqtt.broker import Broker

    broker = Broker(configuration(address, port, users))
    await broker.start()
    await asyncio.Event().wait()  # until the keeper ends this process


def main(arguments: list[str]) -> None:
    """Serve until ended."""
    logging.basicConfig(level=logging.ERROR)
    # amqtt formats every payload into a debug line; disabled loggers at least do not write it.
    logging.disable(logging.WARNING)
    users = Path(arguments[2]) if len(arguments) > 2 else None
    asyncio.run(_serve(arguments[0], int(arguments[1]), users))


if __name__ == "__main__":
    main(sys.argv[1:])
