"""Everything that an experiment can time: Hepti's strategies, its own choice, and the outside baselines; a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from hepti_mqtt.bench.outside import BASELINES
from hepti_mqtt.lowering import Graph
from hepti_mqtt.shares import Options
from hepti_mqtt.strategies import STRATEGIES

AUTO: Final = "auto"
SITE: Final = "site"  # sources: who is asked, see `sources`
OUTSIDE: Final = "outside"


class Contender(NamedTuple):
    """source: who is asked. least, most: numbers of devices, None: no limit. wires: has wire dtypes and routes.

    strategy, options: of Hepti's own methods, None and none of others.
    """

    source: str
    least: int
    most: int | None
    wires: bool
    strategy: str | None = None
    options: Options | None = None

    def takes(self, devices: int) -> bool:
        """Return whether it runs on so many devices."""
        if self.least > devices or (self.most is not None and devices > self.most):
            return False
        return self.strategy is None or (self.options or {}) in [
            dict(o) for o in STRATEGIES[self.strategy].choices(devices)
        ]

    def divides(self, kind: Graph) -> bool:
        """Return whether it can compute a model."""
        return self.strategy is None or STRATEGIES[self.strategy].unsupported(kind) is None


def _of_strategy(strategy: str, options: Options) -> Contender:
    alone = STRATEGIES[strategy].most_devices == 1
    return Contender(SITE, 1 if alone else 2, 1 if alone else None, not alone, strategy, dict(options))


MOST: Final = 16  # devices up to which variants that depend on their number have names here
_METHODS: Final = {
    "/".join([s.name, *options.values()]): _of_strategy(s.name, options)
    for s in STRATEGIES.values()
    for options in s.every(MOST).values()
}
STRATEGY_NAMES: Final = (AUTO, *_METHODS)


CONTENDERS: Final[Mapping[str, Contender]] = {
    AUTO: Contender(SITE, 2, None, wires=True),
    **_METHODS,
    **{name: Contender(OUTSIDE, b.least, b.most, wires=False) for name, b in BASELINES.items()},
}
# What every other cell is compared with: the method of the site that knows one device only.
ALONE: Final = next(s.name for s in STRATEGIES.values() if s.most_devices == 1)
