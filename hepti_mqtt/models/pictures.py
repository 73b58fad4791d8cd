"""What a preprocessor_config.json says of pictures: which part of them a model sees, and the scale of its pixels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from hepti_mqtt.errors import ModelError, UnsupportedModelError
from hepti_mqtt.models.config import JsonConfig

FILE: Final = "preprocessor_config.json"
IMAGENET_MEAN: Final = (0.485, 0.456, 0.406)
IMAGENET_STD: Final = (0.229, 0.224, 0.225)
_CROP: Final = 224 / 256  # of a picture's shorter side that torchvision and ConvNeXT's preprocessor keep
_WARPED: Final = 384  # from this side on ConvNeXT's preprocessor makes pictures square and crops nothing


class Crop(NamedTuple):
    """What a model sees of a picture: the middle S x S after its shorter side was made `shortest`, 0: all of it."""

    size: int
    shortest: int


def preprocessor(extras: Mapping[str, Any]) -> JsonConfig:
    """Return the preprocessor's file, empty where there is none."""
    return JsonConfig(FILE, extras.get(FILE, {}))


def pixel_scale(
    pre: JsonConfig, mean: float | tuple[float, ...], std: float | tuple[float, ...]
) -> tuple[tuple[float, ...], ...]:
    """Return mean and std per channel, of pixels from 0 to 1, with the preprocessor's factor in them."""
    means: tuple[float, ...] = (0.0,) * 3
    stds: tuple[float, ...] = (1.0,) * 3
    if pre.flag("do_normalize", True):
        means = pre.per_channel("image_mean", 3, mean)
        stds = pre.per_channel("image_std", 3, std)
        if min(stds) <= 0:
            raise pre.bad_value("image_std", "numbers > 0", stds)
    factor = 255 * (pre.number("rescale_factor", 1 / 255) if pre.flag("do_rescale", True) else 1.0)
    return tuple(v / factor for v in means), tuple(v / factor for v in stds)


def find_crop(pre: JsonConfig, size: int | None) -> Crop:
    """Return what of a picture a model sees; size: of its own, where it has one. Raises ModelError.

    Without a file it is what torchvision does: of the picture with a shorter side of 256, 224 x 224 in the middle.
    """
    if not pre.data:
        side = size or 224
        return Crop(side, round(side / _CROP))
    if not pre.flag("do_resize", True):
        raise UnsupportedModelError(f"{FILE}: do_resize false is not supported: pictures come in any size")
    wanted = pre.get("size", size or 224)
    if pre.flag("do_center_crop", False):
        found = Crop(_square(pre, "crop_size", size or 224), _shortest(pre, wanted))
        if found.shortest < found.size:
            raise ModelError(f"{FILE}: crop_size {found.size} is larger than size {wanted!r}; restore the file")
    elif "crop_pct" in pre.data or "ConvNext" in str(pre.get("image_processor_type", "")):
        side = _shortest(pre, wanted)
        found = Crop(side, int(side / pre.number("crop_pct", _CROP)) if side < _WARPED else 0)
    else:
        found = Crop(_square(pre, "size", size or 224), 0)
    if size not in (None, found.size):
        raise ModelError(f"{FILE}: pictures become {found.size} x {found.size}, and the model reads {size} x {size}")
    return found


def _shortest(pre: JsonConfig, wanted: Any) -> int:
    """Return the shorter side that pictures get."""
    if isinstance(wanted, Mapping):
        wanted = wanted.get("shortest_edge")
    if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1:
        raise pre.bad_value("size", "an integer >= 1 or {'shortest_edge': an integer >= 1}", pre.get("size", None))
    return wanted


def _square(pre: JsonConfig, key: str, default: int) -> int:
    """Return the side of a square that is given as one integer or as height and width."""
    value = pre.get(key, default)
    sides: set[Any] = {value.get("height"), value.get("width")} if isinstance(value, Mapping) else {value}
    side = sides.pop()
    if sides or not isinstance(side, int) or isinstance(side, bool) or side < 1:
        raise pre.bad_value(key, "an integer >= 1, or equal height and width", value)
    return side
