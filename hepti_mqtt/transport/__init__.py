"""MQTT: connections to the broker and between devices."""
