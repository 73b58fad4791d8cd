"""Tensors from device to device: every device is an MQTT endpoint for what it publishes itself."""

from hepti_mqtt.transport.mesh.events import Dropped, Edge, Joined, Lost, MeshEvent, Place, Refused
from hepti_mqtt.transport.mesh.lines import mesh_possible
from hepti_mqtt.transport.mesh.mesh import Mesh
from hepti_mqtt.transport.mesh.tls import MeshTls

__all__ = ["Dropped", "Edge", "Joined", "Lost", "Mesh", "MeshEvent", "MeshTls", "Place", "Refused", "mesh_possible"]
