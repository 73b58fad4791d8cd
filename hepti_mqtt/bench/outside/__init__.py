"""Outside baselines: the same weights under PyTorch and ONNX Runtime, on the hosts of a lab."""

from hepti_mqtt.bench.outside.baselines import BASELINES, require
from hepti_mqtt.bench.outside.processes import Outside

__all__ = ["BASELINES", "Outside", "require"]
