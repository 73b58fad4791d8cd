"""The name of a client who has not chosen one."""

from __future__ import annotations

import uuid

from hepti_mqtt.errors import BadNameError
from hepti_mqtt.ids import check_name


def client_name(user: str | None) -> str:
    """Return the broker's user if that can stand in a topic, as access lists want it, else a random name."""
    try:
        return check_name("client", user or "")
    except BadNameError:
        return f"py-{uuid.uuid4().hex[:12]}"
