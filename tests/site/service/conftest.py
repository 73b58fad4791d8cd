"""Fixtures of this room, which has tests in other tiers too."""

from service_fixtures import *  # noqa: F403
