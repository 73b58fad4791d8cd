"""MQTT: the only place that imports paho."""

from hepti_mqtt.transport.base import (
    Connected,
    Counts,
    Delivery,
    Disconnected,
    Inbox,
    OnDelivery,
    OnMessage,
    OnState,
    Receipt,
    Refused,
    State,
    Subscribed,
    Transport,
    Will,
)
from hepti_mqtt.transport.control import PahoTransport
from hepti_mqtt.transport.data_connection import DataConnection, data_connection_possible
from hepti_mqtt.transport.limits import largest_packet
from hepti_mqtt.transport.open import is_loopback, open_broker_warning, open_line
from hepti_mqtt.transport.room import Room, queue_room
from hepti_mqtt.transport.url import BrokerUrl

__all__ = [
    "BrokerUrl",
    "Connected",
    "Counts",
    "DataConnection",
    "Delivery",
    "Disconnected",
    "Inbox",
    "OnDelivery",
    "OnMessage",
    "OnState",
    "PahoTransport",
    "Receipt",
    "Refused",
    "Room",
    "State",
    "Subscribed",
    "Transport",
    "Will",
    "data_connection_possible",
    "is_loopback",
    "largest_packet",
    "open_broker_warning",
    "open_line",
    "queue_room",
]
