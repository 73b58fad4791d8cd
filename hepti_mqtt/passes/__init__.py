"""Passes from Program to Program, for every method alike."""

from __future__ import annotations

from hepti_mqtt.passes.fuse import fuse
from hepti_mqtt.passes.join import joined
from hepti_mqtt.passes.narrow import narrow
from hepti_mqtt.passes.route import routed
from hepti_mqtt.passes.storage import store, stored
from hepti_mqtt.passes.widen import widened

__all__ = ["fuse", "joined", "narrow", "routed", "store", "stored", "widened"]
