"""How a planner runs, from the options it was started with."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hepti_mqtt.config import Settings
from hepti_mqtt.config.options import PlannerOptions, RequestPins
from hepti_mqtt.ids import check_name
from hepti_mqtt.runtime.planner.flight import Pins
from hepti_mqtt.runtime.planner.packs import Batching
from hepti_mqtt.transport import BrokerUrl


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """One site's planner.

    models: directory by name. pins: what the user fixed, by model. in_flight: runs at once, per model. batching: which
    requests run together. broker_mbit: rate of the broker's own link, None for that of the fastest device's.
    request_pins: "none" refuses what requests pin for themselves. state_dir: where the boot counter is kept, by default
    the user's state directory.
    """

    url: BrokerUrl
    site: str
    models: Mapping[str, str | Path]
    pins: Mapping[str, Pins] = field(default_factory=dict)
    in_flight: int = 2
    batching: Batching = field(default_factory=Batching)
    broker_mbit: float | None = None
    request_pins: RequestPins = "any"
    state_dir: Path | None = None
    log: logging.Logger = field(default_factory=lambda: logging.getLogger("hepti.planner"))

    @classmethod
    def of(cls, settings: Settings, options: PlannerOptions) -> PlannerConfig:
        """Return what a command line asks for; raises ConfigError for a missing broker, a bad URL or site."""
        return cls(
            url=BrokerUrl.parse(settings.require_broker()),
            site=check_name("site", settings.site),
            models=options.models,
            pins=dict.fromkeys(options.models, options.pins.pins()),
            in_flight=options.in_flight,
            batching=Batching(options.batch, options.batch_delay_ms / 1e3),
            broker_mbit=options.broker_mbit,
            request_pins=options.request_pins,
        )
