"""What is known of devices and links: measured time curves, memory, rates."""

from hepti_mqtt.cluster.profiles import (
    FAST_BYTES_PER_S,
    RATES,
    Cluster,
    Curve,
    DeviceProfile,
    Link,
    PeerLink,
    Power,
    cluster_of,
    frames_foreseen,
    peer_links_of,
    plausible,
    profile_from_caps,
)
from hepti_mqtt.cluster.ways import AIR, BROKER_IN, BROKER_OUT, Way, Ways

__all__ = [
    "AIR",
    "BROKER_IN",
    "BROKER_OUT",
    "FAST_BYTES_PER_S",
    "RATES",
    "Cluster",
    "Curve",
    "DeviceProfile",
    "Link",
    "PeerLink",
    "Power",
    "Way",
    "Ways",
    "cluster_of",
    "frames_foreseen",
    "peer_links_of",
    "plausible",
    "profile_from_caps",
]
