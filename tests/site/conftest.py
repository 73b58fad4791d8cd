"""A broker for the tests of one file."""

from __future__ import annotations

import pytest

from hepti_mqtt.embedded_broker import start_broker


@pytest.fixture(scope="module")
def broker():
    with start_broker() as running:
        yield running
