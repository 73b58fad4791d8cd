"""Shares: each device's part of a model, and the solvers for them; methods choose a solver."""

from __future__ import annotations

from hepti_mqtt.shares.share import Branches, DeviceResources, Options, Share, Shares, Speeds

__all__ = ["Branches", "DeviceResources", "Options", "Share", "Shares", "Speeds"]
