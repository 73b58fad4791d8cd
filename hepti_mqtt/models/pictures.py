"""How a model's files say that pictures are read: which part of them it sees, and the scale of its pixels.

What a file leaves out is what the class that it names does; a mean and a deviation are never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from hepti_mqtt.core.errors import ModelError, UnsupportedModelError
from hepti_mqtt.models.config import JsonConfig, KeyTable

FILE: Final = "preprocessor_config.json"
PROCESSOR: Final = "processor_config.json"  # of transformers from 5.3 on, with the other file's content inside
_CROP: Final = 224 / 256  # of a picture's shorter side that ConvNeXT's class keeps
_WARPED: Final = 384  # from this side on it makes pictures square and crops nothing
_BILINEAR: Final = 2
_BICUBIC: Final = 3
_FILTERS: Final = 5  # the last of Pillow's resampling filters

KEYS: Final = KeyTable(
    read=frozenset({
        "crop_pct", "crop_size", "default_to_square", "do_center_crop", "do_normalize", "do_rescale", "do_resize",
        "feature_extractor_type", "image_mean", "image_processor_type", "image_std", "include_top", "resample",
        "rescale_factor", "rescale_offset", "size",
    }),
    # do_convert_rgb: pictures are always converted to RGB. do_reduce_labels: for maps of segments only.
    without_effect=frozenset({
        "_processor_class", "_valid_kwargs_names", "_valid_processor_keys", "data_format", "device",
        "disable_grouping", "do_convert_rgb", "do_reduce_labels", "input_data_format", "model_input_names",
        "processor_class", "return_tensors",
    }),
)  # fmt: skip


class Crop(NamedTuple):
    """The part of a picture that a model reads: the middle S x S of the resized picture."""

    #: S in pixels.
    size: int
    #: Pixels of the resized shorter side, 0 to read the whole picture.
    shortest: int
    #: Both sides are resized to `shortest`.
    square: bool = False


@dataclass(frozen=True, slots=True)
class _Class:
    """Defaults of a class of transformers; None: versions differ."""

    size: int | dict[str, int] | None
    resample: int | None
    square: bool = False  # an integer size is both sides, else the shorter side
    crop: int | None = 0  # 0: no cropping
    by_part: bool = False  # crops a part of the picture, not a size
    cut: int = 224  # size of a crop without `crop_size`
    scales_twice: bool = False  # divides by the deviation twice if `include_top`, and has the key `rescale_offset`


_SHORTEST: Final = {"shortest_edge": 224}
_CLASSES: Final[Mapping[str, _Class]] = {
    "ViT": _Class(224, _BILINEAR, square=True),
    "DeiT": _Class(256, _BICUBIC, square=True, crop=224),
    "Beit": _Class(None, _BICUBIC, square=True, crop=None),
    "Siglip": _Class({"height": 224, "width": 224}, _BICUBIC),
    "CLIP": _Class(_SHORTEST, _BICUBIC, crop=224),
    "Bit": _Class(_SHORTEST, _BICUBIC, crop=224),
    "MobileNetV1": _Class({"shortest_edge": 256}, _BILINEAR, crop=224),
    "MobileNetV2": _Class({"shortest_edge": 256}, _BILINEAR, crop=224),
    "EfficientNet": _Class({"height": 346, "width": 346}, None, cut=289, scales_twice=True),
    "ConvNext": _Class({"shortest_edge": 384}, None, by_part=True),
}


def processor_file(extras: Mapping[str, Any]) -> JsonConfig:
    """Return the file with the rules for pictures; raises ModelError if there is none."""
    whole = extras.get(PROCESSOR)
    inside = whole.get("image_processor") if isinstance(whole, Mapping) else None
    if inside is not None:
        return JsonConfig(f"{PROCESSOR}: image_processor", inside)
    if FILE in extras:
        return JsonConfig(FILE, extras[FILE])
    raise ModelError(
        f"{FILE} is missing, and it says how pictures become pixels; copy it from the original, "
        'or write it: {"size": {"height": S, "width": S} or {"shortest_edge": S}, "do_center_crop", '
        '"crop_size", "resample", "image_mean", "image_std"}'
    )


def filter_number(file: JsonConfig, default: int | None) -> int:
    """Return the number of Pillow's filter, None as default for a file that must say it; raises ModelError."""
    value = file.require("resample") if default is None else file.get("resample", default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _FILTERS:
        raise file.bad_value("resample", f"a number from 0 to {_FILTERS}", value)
    return value


def pixel_scale(file: JsonConfig, factor: float | None = None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and std per channel, of pixels from 0 to 1; factor: of pixels, by default the file's."""
    means: tuple[float, ...] = (0.0,) * 3
    stds: tuple[float, ...] = (1.0,) * 3
    if file.flag("do_normalize", True):
        means, stds = (file.per_channel(key, 3) for key in ("image_mean", "image_std"))
        if min(stds) <= 0:
            raise file.bad_value("image_std", "numbers > 0", stds)
    factor = _factor(file) if factor is None else factor
    return tuple(v / factor for v in means), tuple(v / factor for v in stds)


def _factor(file: JsonConfig) -> float:
    return 255 * (file.number("rescale_factor", 1 / 255) if file.flag("do_rescale", True) else 1.0)


class Preprocessor:
    """The file that describes a model's pictures, and its class of transformers, if any."""

    def __init__(self, usual: str | None, extras: Mapping[str, Any]) -> None:
        """Read and check the file; usual: the class of models of this type, if they have one.

        Raises ModelError if there is none, UnsupportedModelError for what it asks for.
        """
        self.config = processor_file(extras)
        on = {k: v for k, v in self.config.data.items() if not (k.startswith("do_") and v is False)}
        JsonConfig(self.config.file, on).check_keys(KEYS)
        self._class = self._known_class(usual)
        self.resample = filter_number(self.config, self._class.resample if self._class is not None else None)

    def _known_class(self, usual: str | None) -> _Class | None:
        """Return the class that the file names, else the usual one, if there is one."""
        named = self.config.get("image_processor_type", self.config.get("feature_extractor_type", None))
        if named is None:
            return _CLASSES[usual] if usual is not None else None
        kind = str(named)
        for end in ("Fast", "Pil", "ImageProcessor", "FeatureExtractor"):
            kind = kind.removesuffix(end)
        if kind not in _CLASSES:
            names = ", ".join(f"{name}ImageProcessor" for name in _CLASSES)
            raise UnsupportedModelError(
                f"{self.config.file}: image_processor_type {named!r} is not supported; supported: {names}"
            )
        return _CLASSES[kind]

    def pixel_scale(self) -> tuple[tuple[float, ...], ...]:
        """Return mean and std per channel, of pixels from 0 to 1, with the factor of the file in them."""
        pre = self.config
        means, stds = pixel_scale(pre, factor=1.0)
        if self._class is not None and self._class.scales_twice:
            if pre.flag("do_rescale", True) and pre.flag("rescale_offset", False):
                means = tuple(v + 1 for v in means)
            if pre.flag("include_top", True):
                stds = tuple(a * b for a, b in zip(stds, pre.per_channel("image_std", 3), strict=True))
        elif self.config.get("include_top", False) or self.config.get("rescale_offset", False):
            raise UnsupportedModelError(
                f"{pre.file}: include_top and rescale_offset are for EfficientNetImageProcessor"
            )
        factor = _factor(pre)
        return tuple(v / factor for v in means), tuple(v / factor for v in stds)

    def crop(self, own: int | None) -> Crop:
        """Return the part of a picture that a model reads; own: the model's size, if it has one.

        Raises ModelError, and UnsupportedModelError where pictures would not all become squares of one size.
        """
        pre = self.config
        if not pre.flag("do_resize", True):
            raise UnsupportedModelError(f"{pre.file}: do_resize false is not supported: pictures come in any size")
        crop = self._by_part() if self._class is not None and self._class.by_part else self._by_size()
        if own not in (None, crop.size):
            raise ModelError(f"{pre.file}: pictures become {crop.size} x {crop.size}, and the model reads {own}")
        return crop

    def _by_part(self) -> Crop:
        """Return the crop of ConvNeXT's class: a part of the shorter side."""
        pre = self.config
        if pre.flag("do_center_crop", False):
            raise UnsupportedModelError(f"{pre.file}: do_center_crop is not supported together with crop_pct")
        assert self._class is not None
        side, square = self._side(pre.get("size", self._class.size))
        if square:
            raise pre.bad_value("size", "{'shortest_edge': an integer >= 1}", pre.get("size", None))
        return Crop(side, int(side / pre.number("crop_pct", _CROP)) if side < _WARPED else 0)

    def _by_size(self) -> Crop:
        """Return the crop of all other classes: pictures become squares, or their middle is cut out."""
        pre, usual = self.config, self._class
        if "crop_pct" in pre.data:
            raise UnsupportedModelError(f"{pre.file}: crop_pct is for ConvNextImageProcessor alone; name that type")
        side, square = self._side(pre.get("size", usual.size) if usual and usual.size else pre.require("size"))
        if usual is not None and usual.crop is None:
            pre.require("do_center_crop")
        if not pre.flag("do_center_crop", usual is not None and bool(usual.crop)):
            if not square:
                raise UnsupportedModelError(
                    f"{pre.file}: size {pre.get('size', None)!r} without do_center_crop is not supported: pictures "
                    "would keep their shape, and the model reads squares of one size"
                )
            return Crop(side, 0)
        cut, whole = self._side(
            pre.get("crop_size", usual.crop or usual.cut) if usual else pre.require("crop_size"), True
        )
        if not whole or cut > side:
            raise UnsupportedModelError(
                f"{pre.file}: a crop_size of {cut} is not supported with a size of {pre.get('size', side)!r}"
            )
        return Crop(cut, side, square=True) if square and cut < side else Crop(cut, 0 if square else side)

    def _side(self, value: Any, square: bool | None = None) -> tuple[int, bool]:
        """Return a side in pixels, and whether both sides get it, or the shorter one alone.

        square: what an integer means, by default what the file or its class says.
        """
        if square is None:
            square = self.config.flag("default_to_square", self._class is None or self._class.square)
        sides = dict(zip(("height", "width"), value, strict=False)) if isinstance(value, list) else value
        if isinstance(sides, Mapping):
            sides = {k: v for k, v in sides.items() if v is not None}
            square = {*sides} == {"height", "width"}
            alike = len({*map(str, sides.values())}) == 1 and (square or {*sides} == {"shortest_edge"})
            value = next(iter(sides.values())) if alike else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.config.bad_value(
                "size", "an integer >= 1, equal height and width, or {'shortest_edge': an integer >= 1}", value
            )
        return value, square
