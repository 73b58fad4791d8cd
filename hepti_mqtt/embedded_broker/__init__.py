"""A broker where none is given: a child process, on the loopback address unless told another."""

from hepti_mqtt.embedded_broker.process import EmbeddedBroker
from hepti_mqtt.embedded_broker.start import KINDS, start_broker

__all__ = ["KINDS", "EmbeddedBroker", "start_broker"]
