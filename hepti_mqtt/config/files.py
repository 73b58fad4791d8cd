"""YAML files as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from hepti_mqtt.errors import ConfigError

MAX_FILE_BYTES: Final = 1_000_000


def load_yaml(path: Path | str) -> Any:
    """Return the data of a YAML file: maps, lists, texts, numbers; no tags that make objects.

    Raises `ConfigError` that names the file, the line and the reason.
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
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{file}: {error}") from error


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which lets a repeated key replace the first one without a word; this one does not."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def mapping(where: str, data: Any) -> Mapping[str, Any]:
    """Return `data` as it is; raises ConfigError that says `where` for what is no mapping."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where} is a mapping of keys, not {type(data).__name__}")
    return data
