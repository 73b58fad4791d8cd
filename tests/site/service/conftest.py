"""Fixtures of this room, which has tests in other tiers too."""

from __future__ import annotations

import pytest
from service_fixtures import *  # noqa: F403

from hepti_mqtt.transport.url import BrokerUrl


@pytest.fixture
def url(broker, kept_hashes):
    return BrokerUrl.parse(broker.url)
