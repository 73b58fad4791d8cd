"""Translates timm's config.json to the keys of Hugging Face's files."""

from __future__ import annotations

from collections.abc import Mapping
from math import floor
from typing import Any, Final

from hepti_mqtt.core.errors import UnsupportedModelError
from hepti_mqtt.models.config import JsonConfig
from hepti_mqtt.models.pictures import FILE

_FILTERS: Final = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3}  # Pillow's numbers


def translated(config: Mapping[str, Any], extras: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return (config.json, the other files) with Hugging Face's keys; unchanged if timm did not write them.

    Raises ModelError, UnsupportedModelError for unsupported files.
    """
    if "architecture" not in config or "architectures" in config or not isinstance(config.get("pretrained_cfg"), dict):
        return config, extras
    read, cfg = JsonConfig("config.json", config), JsonConfig("config.json: pretrained_cfg", config["pretrained_cfg"])
    read.require_one_of("global_pool", "avg", "avg")
    if read.get("model_args", {}):
        raise UnsupportedModelError(
            "config.json: model_args may change the model, and their meaning is not supported; use a model without them"
        )
    cfg.require_one_of("crop_mode", "center", "center")
    cfg.require_one_of("interpolation", "bicubic", *_FILTERS)
    size = cfg.require("input_size")
    if not isinstance(size, list) or len(size) != 3 or size[0] != 3 or size[1] != size[2]:
        raise cfg.bad_value("input_size", "[3, S, S]", size)
    side = JsonConfig("config.json: pretrained_cfg", {"input_size": size[1]}).positive("input_size")
    labels = read.positive("num_classes")
    names = read.get("label_names", None) or [f"LABEL_{i}" for i in range(labels)]
    if not isinstance(names, list) or len(names) != labels:
        raise read.bad_value("label_names", f"a list of {labels} names", names)
    preprocessor = {
        "size": {"shortest_edge": floor(side / cfg.number("crop_pct", 0.875))},
        "do_center_crop": True,
        "crop_size": side,
        "resample": _FILTERS[cfg.get("interpolation", "bicubic")],
        "image_mean": cfg.require("mean"),
        "image_std": cfg.require("std"),
    }
    new = {
        "architectures": [config["architecture"]],
        "model_type": "torchvision",
        "image_size": side,
        "id2label": {str(i): str(name) for i, name in enumerate(names)},
    }
    return new, {FILE: preprocessor, **extras}
