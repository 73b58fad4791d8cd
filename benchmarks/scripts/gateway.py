"""What the gateway adds to a request: OpenAI's embeddings by HTTP beside the same by MQTT, on this machine.

One asyncio program asks both by turns, over one connection that stays open, so that a drifting machine hits both alike.
Answers are compared to the last bit before anything is timed.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from benchmarks.errors import BenchError
from benchmarks.lab.lab import Lab
from benchmarks.lab.site import LabSite
from benchmarks.lab.spec import HostSpec, LabSpec
from benchmarks.tables import table
from hepti_mqtt.checkpoint import make_model
from hepti_mqtt.cli.shared import AgentOptions
from hepti_mqtt.client import AsyncHepti

PATIENCE_S: Final = 60.0
WARMUP: Final = 20


def main(model: str = "tiny-bert", text: str = "a warm room", repeat: int = 500) -> None:
    """Print medians of both ways, what HTTP adds, and the gateway's CPU time for one request."""
    with TemporaryDirectory(prefix="hepti-gateway-") as scratch:
        directory = make_model(model, Path(scratch) / "model")
        spec = LabSpec("gateway", "local", (HostSpec("agent0"),))
        agents = {"agent0": AgentOptions("agent0", 1, "1GiB")}
        with (
            Lab(spec, Path(scratch) / "lab") as lab,
            LabSite(lab, {"model": directory}, (), agents) as site,
            _gateway(site) as (port, process),
        ):
            mqtt, http, cpu = asyncio.run(_turns(site, port, process, text, repeat))
    added = median(b - a for a, b in zip(mqtt, http, strict=True))
    ratio = median(b / a for a, b in zip(mqtt, http, strict=True))
    times = (median(mqtt), median(http), added, cpu / repeat)
    rows = [(*(f"{1e3 * seconds:.2f}" for seconds in times), f"{ratio:.2f}")]
    print(f"{model}, {repeat} turns; medians in ms\n")
    print("\n".join(table(("MQTT", "HTTP", "HTTP adds", "gateway's CPU for one", "HTTP over MQTT"), rows)))


@contextmanager
def _gateway(site: LabSite) -> Iterator[tuple[int, int]]:
    """Yield the port and the process id of a gateway to a site."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = int(found.getsockname()[1])
    command = [sys.executable, "-m", "hepti_mqtt.cli", "gateway", "--port", str(port), "--no-announce"]
    process = subprocess.Popen(command, env={**os.environ, "HEPTI_BROKER": site.url, "HEPTI_SITE": site.site})
    try:
        yield port, process.pid
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def _cpu_s(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _turns(
    site: LabSite, port: int, process: int, text: str, repeat: int
) -> tuple[list[float], list[float], float]:
    """Return the seconds of each request by MQTT and by HTTP, and the gateway's CPU seconds for all of them."""
    body = json.dumps({"model": "model", "input": text, "encoding_format": "base64"}).encode()
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    request = head.encode() + b"\r\n\r\n" + body
    mqtt, http, cpu = list[float](), list[float](), 0.0
    async with AsyncHepti.connect(site.url, site=site.site) as hepti:
        await hepti.wait_ready("model", PATIENCE_S)
        reader, writer = await _connected(port)
        for turn in range(-WARMUP, repeat):
            if turn == 0:
                cpu = _cpu_s(process)
            begun = time.perf_counter()
            wanted = (await hepti.infer("model", text=text)).embedding
            between = time.perf_counter()
            writer.write(request)
            status, found = await _answer(reader)
            ended = time.perf_counter()
            vector = np.frombuffer(base64.b64decode(found["data"][0]["embedding"]), "<f4") if status == 200 else ()
            if not np.array_equal(vector, wanted):
                raise BenchError(f"HTTP gives another answer than MQTT (status {status}); nothing was timed")
            if turn >= 0:
                mqtt.append(between - begun)
                http.append(ended - between)
        cpu = _cpu_s(process) - cpu
        writer.close()
    return mqtt, http, cpu


async def _connected(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                await asyncio.sleep(0.1)


async def _answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, Any]]:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    raw = await reader.readexactly(int(head.partition(b"content-length:")[2].split()[0]))
    return int(head.split()[1]), json.loads(raw)
