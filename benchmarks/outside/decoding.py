"""`python -m benchmarks.outside.decoding`: tokens behind a prompt, by llama.cpp or by a site; speaks JSON lines.

stdin: {"do": "read", "model": a GGUF file, "llama": a directory, "cpu": its library, "rows"} or {"do": "meet", "model":
a name}; then {"do": "ask", "ids", "count", ...} with keys of a request; a count of 0 brings the plan up. stdout: one
line for each, {"tokens", "plan", "first_s", "rest_s"} for the last: seconds until the first token, and from it to the
last. The site is that of HEPTI_BROKER and HEPTI_SITE. One thread.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.outside.llama_cpp import LlamaCpp
from hepti_mqtt.client import Hepti

Tokens = Iterator[tuple[int, str]]  # each with the plan that it is of
Ask = Callable[[list[int], int, dict[str, Any]], Tokens]
TIMEOUT_S = 600.0


def reader(model: str, llama: str, cpu: str, rows: int) -> Ask:
    """Return llama.cpp on this host."""
    decoder = LlamaCpp(Path(llama), cpu, Path(model), rows, threads=1)

    def ask(ids: list[int], count: int, keys: dict[str, Any]) -> Tokens:  # noqa: ARG001
        decoder.begin()
        token = int(decoder.add(ids).argmax())
        yield token, ""
        for _ in range(count - 1):
            token = int(decoder.add([token]).argmax())
            yield token, ""

    return ask


def site(model: str) -> Ask:
    """Return a site's model, asked over MQTT."""
    hepti = Hepti.connect(client_id="decoding")

    def ask(ids: list[int], count: int, keys: dict[str, Any]) -> Tokens:
        if not count:
            hepti.infer(model, ids=ids, max_new_tokens=1, want="plan", timeout_s=TIMEOUT_S, **keys)
            return
        parts = hepti.generate(model, ids=ids, max_new_tokens=count, timeout_s=TIMEOUT_S, **keys)
        while True:
            try:
                yield next(parts)["token"], ""
            except StopIteration as end:
                plan = end.value.plan
                yield -1, f"{plan['strategy']}/{plan.get('variant', '')} on {len(plan['devices'])}"
                return

    return ask


def main() -> None:
    """Answer every line of stdin until it ends."""
    ask: Ask | None = None
    for line in sys.stdin:
        order = json.loads(line)
        do, answer = order.pop("do"), dict[str, Any]()
        if do == "ask":
            assert ask is not None, "what decodes comes first"
            found, plan, times = [], "", [time.perf_counter()]
            for token, its_plan in ask(order.pop("ids"), order.pop("count"), order):
                plan = its_plan or plan
                if token >= 0:
                    found.append(token)
                    times.append(time.perf_counter())
            answer = {
                "tokens": found,
                "plan": plan,
                "first_s": times[min(1, len(found))] - times[0],
                "rest_s": times[-1] - times[min(1, len(found))],
            }
        else:
            ask = (reader if do == "read" else site)(**order)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
