"""`python -m benchmarks.outside.speech`: a recording to text by faster-whisper or by a site; speaks `lines`.

stdin: {"do": "read", "model": a directory, "audio": a WAV file} or {"do": "meet", "model": a name, "audio"}; then
{"do": "ask", ...} with options of `WhisperModel.transcribe` or {"encodes": true}, or keys of a request. stdout:
{"text", "plan", "ms"}. The site is that of HEPTI_BROKER and HEPTI_SITE. One thread.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.outside.lines import TIMEOUT_S, Ask, plan_of, serve
from hepti_mqtt.client import Hepti


def _answer(begin: float, text: str, plan: str = "") -> dict[str, Any]:
    return {"text": text.strip(), "plan": plan, "ms": 1e3 * (time.perf_counter() - begin)}


def reader(model: str, audio: str) -> Ask:
    """Return faster-whisper on this host: CTranslate2 in float32."""
    from faster_whisper import WhisperModel, decode_audio
    from faster_whisper.audio import pad_or_trim

    whisper, sound = WhisperModel(model, device="cpu", compute_type="float32", cpu_threads=1), decode_audio(audio)

    def ask(**options: Any) -> dict[str, Any]:
        begin = time.perf_counter()
        if "encodes" in options:
            whisper.encode(pad_or_trim(whisper.feature_extractor(sound)))
            return _answer(begin, "")
        segments, _ = whisper.transcribe(sound, **options)
        return _answer(begin, "".join(segment.text for segment in segments))

    return ask


def site(model: str, audio: str) -> Ask:
    """Return a site's model, asked over MQTT."""
    hepti, sound = Hepti.connect(client_id="speech"), Path(audio).read_bytes()

    def ask(**keys: Any) -> dict[str, Any]:
        begin = time.perf_counter()
        answer = hepti.infer(model, audio=sound, **keys, timeout_s=TIMEOUT_S)
        return _answer(begin, (answer.result or {}).get("text", ""), plan_of(answer))

    return ask


if __name__ == "__main__":
    serve({"read": reader, "meet": site})
