"""Settings of users: sizes, YAML files, bundled files and the environment."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from hepti_mqtt.core.errors import ConfigError
from hepti_mqtt.core.ids import check_name

LISTED: Final = 12  # most words that an error lists


def nearest(word: str, valid: Collection[str]) -> str:
    """Return the end of an error's sentence about an unknown word: the nearest valid word, or a short list of all."""
    near = difflib.get_close_matches(word, valid, 1)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; there are {', '.join(valid)}" if len(valid) <= LISTED else ""


_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_MOST: Final = 2**63  # limit of the wire format


def parse_size(text: str) -> int:
    """Return bytes from "400MiB", "2GB" or a plain number. Raises ConfigError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmg]i?|)b?", text.strip().lower())
    nbytes = 0.0 if match is None else float(match[1]) * _UNITS[match[2]]
    if match is None or nbytes >= _MOST:
        raise ConfigError(f"{text!r} is not a size; write e.g. 400MiB or 2GB")
    return int(nbytes)


# ----------------------------------------------------------------------------------------------------------------------
# YAML files as plain data.


MAX_FILE_BYTES: Final = 1_000_000
MAX_DEPTH: Final = 32  # of lists and maps within each other


def load_yaml(path: Path | str) -> Any:
    """Return the data of a YAML file: maps, lists, texts, numbers; no tags for objects.

    Raises `ConfigError` with file, line and reason.
    """
    file = Path(path)
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{file} is larger than {MAX_FILE_BYTES} bytes; a configuration is small")
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise ConfigError(f"{file}{line}: {error.problem or error.context or error}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{file}: {error}") from error


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, but refusing a repeated key and deep nesting, which takes the scanner quadratic time."""

    def fetch_flow_collection_start(self, token: Any) -> None:
        self._check_depth()
        super().fetch_flow_collection_start(token)

    def add_indent(self, column: int) -> bool:
        self._check_depth()
        return bool(super().add_indent(column))

    def _check_depth(self) -> None:
        if self.flow_level + len(self.indents) >= MAX_DEPTH:
            raise yaml.scanner.ScannerError(None, None, f"more than {MAX_DEPTH} levels of nesting", self.get_mark())

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in keys:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands twice", key.start_mark)
                keys.add(key.value)
        return super().construct_mapping(node, deep)


def mapping(where: str, data: Any) -> Mapping[str, Any]:
    """Return `data` if it is a mapping. Raises ConfigError that contains `where`."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where} is a mapping of keys, not {type(data).__name__}")
    return data


# ----------------------------------------------------------------------------------------------------------------------
# Bundled sites and systemd units, in a checkout's `configs` or in the package.


_CHECKOUT: Final = Path(__file__).parents[2] / "configs"
CONFIG_DIR: Final = _CHECKOUT if _CHECKOUT.is_dir() else Path(__file__).parents[1] / "configs"


def bundled_sites() -> dict[str, Path]:
    """Return the bundled site files by name."""
    return {path.stem: path for path in sorted((CONFIG_DIR / "sites").glob("*.yaml"))}


def find_bundled_site(given: Path, others: Collection[str] = ()) -> Path:
    """Return the given file if it exists, else the bundled file by name or as `configs/sites/NAME`.

    others: further valid names. Raises ConfigError for an unknown name.
    """
    bare = given if str(given.parent) == "." else Path(given.name) if given.parent == Path("configs", "sites") else None
    if given.exists() or bare is None:
        return given
    name, files = bare.name.removesuffix(".yaml"), bundled_sites()
    if name not in files:
        raise ConfigError(
            f"there is no file {given}, and no site {name!r} comes with Hepti{nearest(name, [*files, *others])}"
        )
    return files[name]


# ----------------------------------------------------------------------------------------------------------------------
# Other variables; an invalid value is an error at the start.


KERNELS: Final = "HEPTI_KERNELS_"


def check_environment() -> None:
    """Raise ConfigError if a variable requests unavailable kernels; import Numba only if such a variable is set."""
    if any(value for name, value in os.environ.items() if name.startswith(KERNELS)):
        from hepti_mqtt.kernels.cpu import require_known

        require_known()


# ----------------------------------------------------------------------------------------------------------------------
# Settings of all commands, from flags or the environment.


DEFAULT_SITE: Final = "home"


@dataclass(frozen=True, slots=True)
class Settings:
    """The broker and site of a command."""

    broker: str | None  #: URL or login file, None to start a broker
    site: str = DEFAULT_SITE

    @classmethod
    def from_environment(
        cls, broker: str | None = None, site: str | None = None, environment: Mapping[str, str] | None = None
    ) -> Settings:
        """Return the flags `--broker` and `--site`, else HEPTI_BROKER and HEPTI_SITE, else the defaults.

        environment: replaces the process's environment; empty variables are ignored. Raises `BadNameError` for an
        invalid site name.
        """
        variables = os.environ if environment is None else environment
        chosen = site or variables.get("HEPTI_SITE") or DEFAULT_SITE
        return cls(broker or variables.get("HEPTI_BROKER") or None, check_name("site", chosen))

    def require_broker(self) -> str:
        """Return the broker's URL or login file. Raises ConfigError without one."""
        if self.broker is None:
            raise ConfigError(
                "no broker: give --broker mqtt://HOST:1883 or a login file, or set HEPTI_BROKER (`hepti broker` starts "
                "one, `hepti demo` needs none)"
            )
        return self.broker
