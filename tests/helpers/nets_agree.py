"""How far the answers of divided CNNs are from one device's, with the real kernels, in one process.

`make test-nets` prints it for the models of full size: minutes, and 2 GB of memory. Small ones are a wide test.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from sites import plan, request
from together import bound, run_together

from hepti_mqtt import models
from hepti_mqtt.checkpoint import KINDS, Checkpoint, make_model, spec_of_kind
from hepti_mqtt.core.spec import Spec
from hepti_mqtt.models.cnn.nodes import CnnSpec
from hepti_mqtt.strategies import STRATEGIES, Method
from hepti_mqtt.strategies.plan_programs import device_programs

NETS = [kind for kind in KINDS if isinstance(spec_of_kind(kind), CnnSpec)]
SMALL = [kind for kind in NETS if kind.startswith("tiny-")]
METHODS = ("map_rows", "modnn", "coedge", "edgeflow", "fused_tiles", "pipeline")
SHARES = ((1.0,), (1.0, 2.0), (2.0, 0.5, 1.0), (1.0, 0.5, 2.0, 1.0), (1.0, 0.5, 2.0, 1.0, 1.0))
BAR = 1e-4  # of the largest number of the answer


class Net:
    """A model, a seeded picture, and what one device answers."""

    def __init__(self, spec: Spec, held: Mapping[str, np.ndarray]) -> None:
        self.spec, self.held = spec, held
        self.shape, self.inputs = request(spec, (1,))
        self.alone = self.answer("single", {}, (1.0,))

    def answer(self, method: str, options: Mapping[str, str], weights: tuple[float, ...]) -> np.ndarray:
        """Return the answer under a method on as many devices as there are weights."""
        parts = device_programs(self.spec, plan(self.spec, (method, options), weights), self.shape)
        return run_together(bound(parts, self.held), self.inputs)

    def off(self, method: str, options: Mapping[str, str], weights: tuple[float, ...]) -> float:
        """Return the largest difference to one device, relative to the largest number of its answer."""
        difference = np.abs(self.answer(method, options, weights) - self.alone).max()
        return float(difference / np.abs(self.alone).max())


def variants(net: Net, method: Method, devices: int) -> Iterator[Mapping[str, str]]:
    """Yield the variants that the planner prices for a net, and those with a bag."""
    yield from method.variants_for(devices, models.graph(net.spec, net.shape))
    yield from (options for options in method.options if method.task_count(options))


def main() -> int:
    """Print the largest difference of each method over 1 to 5 devices, its first variant and leased ones on four."""
    kinds = sys.argv[1:] or [kind for kind in NETS if kind not in SMALL]
    worst = 0.0
    for kind in kinds:
        with tempfile.TemporaryDirectory() as directory:
            make_model(kind, Path(directory) / "m", seed=1)
            with Checkpoint.open(Path(directory) / "m") as checkpoint:
                net = Net(checkpoint.spec, checkpoint.tensors())
                for name in METHODS:
                    method = STRATEGIES[name]
                    cases = [(next(variants(net, method, len(weights))), weights) for weights in SHARES]
                    cases += [(o, SHARES[3]) for o in method.options if method.task_count(o)][:1]
                    off = max(net.off(name, options, weights) for options, weights in cases)
                    worst = max(worst, off)
                    print(f"| {kind} | `{name}` | {off:.1e} |", flush=True)
    print(f"the largest is {worst:.1e}, {'below' if worst < BAR else 'NOT below'} {BAR:.0e}")
    return int(worst >= BAR)


if __name__ == "__main__":
    sys.exit(main())
