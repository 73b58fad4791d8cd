"""Hepti: MQTT middleware that lets the small computers of one site answer one transformer inference together."""

__version__ = "0.2.0"
