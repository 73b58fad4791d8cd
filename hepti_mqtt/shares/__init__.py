"""Shares: what part of a model each device gets, and everything that solves for it; methods choose among it."""

from __future__ import annotations

from hepti_mqtt.shares.share import Branches, DeviceResources, Options, Share, Shares, Speeds

__all__ = ["Branches", "DeviceResources", "Options", "Share", "Shares", "Speeds"]
