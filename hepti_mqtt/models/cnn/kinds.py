"""Seeded convolutional nets: the real ones, and tiny ones of every sort for tests."""

from __future__ import annotations

from typing import Final

from hepti_mqtt.models.kinds import kinds_of

PICTURE_CLASSES: Final = {
    **{"resnet": "ConvNext", "convnext": "ConvNext"},
    **{"mobilenet_v2": "MobileNetV2", "efficientnet": "EfficientNet"},
}
KINDS: Final = kinds_of("cnn")
