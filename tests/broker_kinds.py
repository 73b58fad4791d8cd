"""A broker of one kind, for tests that it matters to."""

from __future__ import annotations

from typing import Any

import pytest

from hepti_mqtt.embedded_broker import EmbeddedBroker, start_broker
from hepti_mqtt.errors import NetworkError


def broker_of(kind: str | None, **options: Any) -> EmbeddedBroker:
    """Start a broker of this kind, the best one for None; the test is skipped where it cannot be had."""
    try:
        return start_broker(kind, **options)
    except NetworkError as error:
        if kind is None:
            raise
        pytest.skip(str(error))
