"""`python -m benchmarks.outside.speech`: a recording to text by faster-whisper or by a site; speaks JSON lines.

stdin: {"do": "read", "model": a directory, "audio": a WAV file} or {"do": "meet", "model": a name, "audio"}; then
{"do": "ask", ...} with options of `WhisperModel.transcribe` or {"encodes": true}, or keys of a request. stdout: one
line for each, {"text", "plan", "ms"} for the last. The site is that of HEPTI_BROKER and HEPTI_SITE. One thread.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hepti_mqtt.client import Hepti

Ask = Callable[[Mapping[str, Any]], tuple[str, str]]
TIMEOUT_S = 600.0


def reader(model: str, audio: str) -> Ask:
    """Return faster-whisper on this host: CTranslate2 in float32."""
    from faster_whisper import WhisperModel, decode_audio
    from faster_whisper.audio import pad_or_trim

    whisper, sound = WhisperModel(model, device="cpu", compute_type="float32", cpu_threads=1), decode_audio(audio)

    def ask(options: Mapping[str, Any]) -> tuple[str, str]:
        if "encodes" in options:
            whisper.encode(pad_or_trim(whisper.feature_extractor(sound)))
            return "", ""
        segments, _ = whisper.transcribe(sound, **options)
        return "".join(segment.text for segment in segments), ""

    return ask


def site(model: str, audio: str) -> Ask:
    """Return a site's model, asked over MQTT."""
    hepti, sound = Hepti.connect(client_id="speech"), Path(audio).read_bytes()

    def ask(keys: Mapping[str, Any]) -> tuple[str, str]:
        answer = hepti.infer(model, audio=sound, **keys, timeout_s=TIMEOUT_S)
        plan = f"{answer.plan['strategy']} on {len(answer.plan['devices'])}"
        return (answer.result or {}).get("text", ""), plan

    return ask


def main() -> None:
    """Answer every line of stdin until it ends."""
    ask: Ask | None = None
    for line in sys.stdin:
        order = json.loads(line)
        do, answer = order.pop("do"), dict[str, Any]()
        if do == "ask":
            begin = time.perf_counter()
            assert ask is not None, "what reads the recording comes first"
            text, plan = ask(order)
            answer = {"text": text.strip(), "plan": plan, "ms": 1e3 * (time.perf_counter() - begin)}
        else:
            ask = (reader if do == "read" else site)(order["model"], order["audio"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
