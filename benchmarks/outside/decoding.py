"""`python -m benchmarks.outside.decoding`: tokens behind a prompt, by llama.cpp or by a site; speaks `lines`.

stdin: {"do": "read", "model": a GGUF file, "llama": a directory, "cpu": its library, "rows"} or {"do": "meet", "model":
a name}; then {"do": "ask", "ids", "count", ...} with keys of a request; a count of 0 brings the plan up. stdout:
{"tokens", "plan", "first_s", "rest_s"}: seconds until the first token, and from it to the last. The site is that of
HEPTI_BROKER and HEPTI_SITE. One thread.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.outside.lines import TIMEOUT_S, Ask, plan_of, serve
from benchmarks.outside.llama_cpp import LlamaCpp
from hepti_mqtt.client import Hepti


class _Timed:
    """Tokens as they come, from now on."""

    def __init__(self) -> None:
        self.tokens, self._times = list[int](), [time.perf_counter()]

    def add(self, token: int) -> None:
        self.tokens.append(token)
        self._times.append(time.perf_counter())

    def answer(self, plan: str = "") -> dict[str, Any]:
        begin, first, last = self._times[0], self._times[1], self._times[-1]
        return {"tokens": self.tokens, "plan": plan, "first_s": first - begin, "rest_s": last - first}


def reader(model: str, llama: str, cpu: str, rows: int) -> Ask:
    """Return llama.cpp on this host."""
    decoder = LlamaCpp(Path(llama), cpu, Path(model), rows, threads=1)

    def ask(ids: list[int], count: int) -> dict[str, Any]:
        found = _Timed()
        decoder.begin()
        for _ in range(count):
            found.add(int(decoder.add(found.tokens[-1:] or ids).argmax()))
        return found.answer()

    return ask


def site(model: str) -> Ask:
    """Return a site's model, asked over MQTT."""
    hepti = Hepti.connect(client_id="decoding")

    def ask(ids: list[int], count: int, **keys: Any) -> dict[str, Any]:
        if not count:
            hepti.infer(model, ids=ids, max_new_tokens=1, want="plan", timeout_s=TIMEOUT_S, **keys)
            return {}
        found = _Timed()
        parts = hepti.generate(model, ids=ids, max_new_tokens=count, timeout_s=TIMEOUT_S, **keys)
        while True:
            try:
                found.add(next(parts)["token"])
            except StopIteration as end:
                return found.answer(plan_of(end.value))

    return ask


if __name__ == "__main__":
    serve({"read": reader, "meet": site})
