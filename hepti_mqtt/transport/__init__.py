"""MQTT: connections to the broker and between devices."""

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
    Will,
)
from hepti_mqtt.transport.broker_connection import BrokerConnection, DataConnection
from hepti_mqtt.transport.broker_limits import (
    DeliveryWindow,
    Echo,
    PacketLimit,
    QueueCapacity,
    is_loopback,
    largest_packet,
    open_broker_warning,
    open_line,
    queue_capacity,
    warn_of_limits,
)
from hepti_mqtt.transport.name_claim import UNREAD, Claim, StatusReader, claim, new_boot
from hepti_mqtt.transport.url import BrokerUrl
from hepti_mqtt.transport.waiting import wait_for_broker

__all__ = [
    "UNREAD",
    "BrokerConnection",
    "BrokerUrl",
    "Claim",
    "Connected",
    "Counts",
    "DataConnection",
    "Delivery",
    "DeliveryWindow",
    "Disconnected",
    "Echo",
    "Inbox",
    "OnDelivery",
    "OnMessage",
    "OnState",
    "PacketLimit",
    "QueueCapacity",
    "Receipt",
    "Refused",
    "State",
    "StatusReader",
    "Subscribed",
    "Will",
    "claim",
    "is_loopback",
    "largest_packet",
    "new_boot",
    "open_broker_warning",
    "open_line",
    "queue_capacity",
    "wait_for_broker",
    "warn_of_limits",
]
