"""Fixtures of this room, which has tests in other tiers too."""

from transport_fixtures import *  # noqa: F403
