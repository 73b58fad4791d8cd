"""The parallel methods: each is a table of layouts, registered here by name."""

from __future__ import annotations

from hepti_mqtt.strategies.method import Division, Method
from hepti_mqtt.strategies.registry import STRATEGIES

__all__ = ["STRATEGIES", "Division", "Method"]
