"""What a plan takes when devices and links are others than those of its price: from the price, without a simulation.

The simulator says what the time of a request goes to: what one device does alone (a root with embedding and head, the
stages of a pipeline), what the busiest of several does meanwhile, and the rest, in which they wait for links. Each part
grows with the slowest of those that it waits for. Against simulations of BERT-Large and VGG-16 with all devices and
links up to twice as fast or slow, half of the seconds are off by less than 5 %.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.cost.profiles import Cluster
from hepti_mqtt.cost.simulator import DeviceUse

Floats = NDArray[np.float64]
HIDDEN: Final = 0.5  # of the bytes that compute hides, those that show when links get slower: methods differ from 0 to 1
MOST_SHOWN: Final = 1.5  # a byte may take its time on several links, one after the other


@dataclass(frozen=True, slots=True)
class Factors:
    """How many times as long compute, frames and bytes take on each device as in a price: arrays [draws] by device."""

    compute: Mapping[str, Floats]
    frame: Mapping[str, Floats]
    link: Mapping[str, Floats]


@dataclass(frozen=True, slots=True)
class Surface:
    """Seconds of one request, what its devices did, and the seconds that each one's bytes take on its link."""

    seconds: float
    use: Mapping[str, DeviceUse]
    link_s: Mapping[str, float]

    def under(self, factors: Factors) -> Floats:
        """Return the seconds [draws] under other speeds."""
        alone: Any = 0.0
        beside: Any = 0.0
        alone_s = beside_s = 0.0
        for name, use in self.use.items():
            if (busy_s := use.compute_s + use.frame_s) <= 0:
                continue
            slower = (use.compute_s * factors.compute[name] + use.frame_s * factors.frame[name]) / busy_s
            alone, alone_s = alone + use.alone_s * slower, alone_s + use.alone_s
            others_s = max(busy_s - use.alone_s, 0.0)
            beside, beside_s = np.maximum(beside, others_s * slower), max(beside_s, others_s)
        waiting_s = max(self.seconds - alone_s - beside_s, 0.0)
        return np.asarray(alone + beside + waiting_s + self._more_on_links(factors, waiting_s))

    def _more_on_links(self, factors: Factors, waiting_s: float) -> Any:
        """Return the seconds [draws] that devices wait longer for bytes on slower links."""
        if (before := max(self.link_s.values(), default=0.0)) <= 0:
            return 0.0
        more = np.max([s * factors.link[name] for name, s in self.link_s.items()], axis=0) - before
        shown = min(waiting_s / before, MOST_SHOWN)
        return more * np.where(more > 0, (1 - HIDDEN) * shown + HIDDEN * max(shown, 1.0), shown)


def surface(seconds: float, use: Mapping[str, DeviceUse], cluster: Cluster) -> Surface:
    """Return the surface of a request that was simulated with the devices and links of a cluster."""
    return Surface(seconds, use, {d: u.sent_bytes / cluster.links[d].up_bytes_per_s for d, u in use.items()})
