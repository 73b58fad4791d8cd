"""The Python API: `with Hepti.connect(url) as h: h.infer("minilm", text="...")`, and `AsyncHepti` for asyncio."""

from __future__ import annotations

from hepti_mqtt.client.aio import AsyncHepti
from hepti_mqtt.client.client import Hepti
from hepti_mqtt.client.session import Answer

__all__ = ["Answer", "AsyncHepti", "Hepti"]
