"""A broker for sites that have none: a child process, on the loopback address by default."""

from hepti_mqtt.embedded_broker.broker import KINDS, EmbeddedBroker, find_mosquitto, start_broker

__all__ = ["KINDS", "EmbeddedBroker", "find_mosquitto", "start_broker"]
