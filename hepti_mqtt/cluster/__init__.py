"""What is known of devices and links: measured time curves, memory, rates."""

from hepti_mqtt.cluster.profiles import (
    FAST_BYTES_PER_S,
    Cluster,
    Curve,
    DeviceProfile,
    Link,
    cluster_of,
    plausible,
    profile_from_caps,
)

__all__ = [
    "FAST_BYTES_PER_S",
    "Cluster",
    "Curve",
    "DeviceProfile",
    "Link",
    "cluster_of",
    "plausible",
    "profile_from_caps",
]
