"""What every command needs to know, from its flags or the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from hepti_mqtt.errors import ConfigError
from hepti_mqtt.ids import check_name

DEFAULT_SITE: Final = "home"


@dataclass(frozen=True, slots=True)
class Settings:
    """What every command needs to know: the broker's URL or login file (None: start one), and the site."""

    broker: str | None
    site: str = DEFAULT_SITE

    @classmethod
    def of(
        cls,
        broker: str | None = None,
        site: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Settings:
        """Return the flags `--broker` and `--site`, else HEPTI_BROKER and HEPTI_SITE, else the defaults.

        environment: instead of the process's own. An empty variable counts as unset. Raises `BadNameError` for a site
        that cannot stand in a topic.
        """
        variables = os.environ if environment is None else environment
        chosen = site or variables.get("HEPTI_SITE") or DEFAULT_SITE
        return cls(broker or variables.get("HEPTI_BROKER") or None, check_name("site", chosen))

    def require_broker(self) -> str:
        """Return the broker's URL or login file; raises ConfigError if none was given."""
        if self.broker is None:
            raise ConfigError(
                "no broker: give --broker mqtt://HOST:1883 or a login file, or set HEPTI_BROKER (`hepti broker` starts "
                "one, `hepti demo` needs none)"
            )
        return self.broker
