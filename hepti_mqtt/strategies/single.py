"""`single`: one device computes the whole model; the yardstick of every other method."""

from __future__ import annotations

from hepti_mqtt.lowering import Table
from hepti_mqtt.strategies.method import Division, Method


def table(_: Division) -> Table:
    """Return the empty table: everything is computed where it is needed, by the head device."""
    return Table()


METHOD = Method("single", "one device computes everything", table, needs=(), max_devices=1, keeps_cache=True)
