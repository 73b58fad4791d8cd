"""The name of a client who has not chosen one, and what a broker has against it."""

from __future__ import annotations

import uuid

from hepti_mqtt.errors import BadNameError, RefusedError
from hepti_mqtt.ids import check_name
from hepti_mqtt.transport import Refused


def client_name(user: str | None) -> str:
    """Return the broker's user if that can stand in a topic, as access lists want it, else a random name."""
    try:
        return check_name("client", user or "")
    except BadNameError:
        return f"py-{uuid.uuid4().hex[:12]}"


def refusal_of(client_id: str, what: str, state: Refused) -> RefusedError:
    """Return the error of a client whom the broker does not let do something; what: "publish to" or the like."""
    return RefusedError(
        f"the broker does not let client {client_id} {what} {', '.join(state.topics)}: {state.reason}; "
        "a client's name must be its user's, and the user a client (`hepti site add client NAME`, --client NAME)"
    )
