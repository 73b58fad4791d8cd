"""Everything that an experiment can time: Hepti's strategies, its own choice, and the outside baselines; a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from hepti_mqtt.bench.outside import BASELINES
from hepti_mqtt.strategies import STRATEGIES

AUTO: Final = "auto"
SITE: Final = "site"  # sources: who is asked, see `sources`
OUTSIDE: Final = "outside"


class Contender(NamedTuple):
    """source: who is asked. least, most: numbers of devices, None: no limit. wires: has wire dtypes and routes."""

    source: str
    least: int
    most: int | None
    wires: bool

    def takes(self, devices: int) -> bool:
        """Return whether it runs on so many devices."""
        return self.least <= devices and (self.most is None or devices <= self.most)


STRATEGY_NAMES: Final = (
    AUTO,
    *("/".join([s.name, *options.values()]) for s in STRATEGIES.values() for options in s.options),
)


def _of_strategy(name: str) -> Contender:
    known = STRATEGIES.get(name.partition("/")[0])
    alone = known is not None and known.most_devices == 1
    return Contender(SITE, 1 if alone else 2, 1 if alone else None, wires=not alone)


CONTENDERS: Final[Mapping[str, Contender]] = {
    **{name: _of_strategy(name) for name in STRATEGY_NAMES},
    **{name: Contender(OUTSIDE, b.least, b.most, wires=False) for name, b in BASELINES.items()},
}
# What every other cell is compared with: the method of the site that knows one device only.
ALONE: Final = next(s.name for s in STRATEGIES.values() if s.most_devices == 1)
