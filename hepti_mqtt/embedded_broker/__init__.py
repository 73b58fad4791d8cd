"""A broker as a child process for sites without one, on the loopback address by default."""

from hepti_mqtt.embedded_broker.broker import KINDS, EmbeddedBroker, find_mosquitto, start_broker

__all__ = ["KINDS", "EmbeddedBroker", "find_mosquitto", "start_broker"]
