"""Files and environment that a user configures Hepti with; the only place that imports yaml."""

from hepti_mqtt.config.settings import MAX_FILE_BYTES, Settings, load_yaml, mapping

__all__ = ["MAX_FILE_BYTES", "Settings", "load_yaml", "mapping"]
