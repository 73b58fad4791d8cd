"""A device's login floods the site with heartbeats while a client asks: how long the client waits for its answers.

`make test-flood` prints median and worst before and during the flood; the exit code is 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from multiprocessing.synchronize import Event
from pathlib import Path

from site_processes import PATIENCE_S, SITE, Site

from hepti_mqtt.checkpoint import make_model
from hepti_mqtt.client import Answer, Hepti
from hepti_mqtt.embedded_broker import start_broker
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.transport import BrokerConnection, BrokerUrl
from hepti_mqtt.transport.codec import Connect, encode, publish_head

DEVICES = ("a", "b")
ASKS_S = 0.1  # between two requests, also while earlier ones wait
QUIET_S = 10.0
MEDIAN_S, WORST_S = 0.1, 1.0
BATCH_S = 0.01


def flood(url: BrokerUrl, topic: str, payload: bytes, rate: int, started: Event, stop: Event) -> None:
    """Publish a heartbeat `rate` times a second."""
    packet = publish_head(topic, len(payload), 4) + payload
    with socket.create_connection((url.host, url.port)) as broker:
        broker.sendall(encode(Connect(4, "flood")))
        begun, sent = time.monotonic(), 0
        started.set()
        while not stop.wait(BATCH_S):
            due = int((time.monotonic() - begun) * rate) - sent
            broker.sendall(packet * due)
            sent += due
        print(f"flood: {sent / (time.monotonic() - begun):.0f} heartbeats/s", flush=True)


def heartbeat_of(url: BrokerUrl, topic: str) -> bytes:
    """Return a device's next heartbeat."""
    heartbeats: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    connection = BrokerConnection(
        url, "listener", on_message=lambda _, payload: heartbeats.put(bytes(payload)), on_state=lambda _: None
    )
    connection.subscribe([(topic, 0)])
    connection.connect(PATIENCE_S)
    try:
        return heartbeats.get(timeout=PATIENCE_S)
    finally:
        connection.close()


def waits(hepti: Hepti, seconds: float) -> list[float]:
    """Return the seconds from when each request was due until its answer came."""
    took, futures = list[float](), list[Future[Answer]]()
    begun = time.monotonic()
    for number in range(int(seconds / ASKS_S)):
        due_s = begun + number * ASKS_S
        time.sleep(max(due_s - time.monotonic(), 0.0))
        futures.append(hepti.submit("words", ids=[7, 8, 9]))
        futures[-1].add_done_callback(lambda _, due_s=due_s: took.append(time.monotonic() - due_s))
    wait(futures, PATIENCE_S)
    for future in futures:
        future.result(0)
    return took


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=int, default=3000, help="heartbeats a second")
    parser.add_argument("--seconds", type=float, default=20.0, help="of the flood")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="hepti-flood-") as temporary, start_broker() as broker:
        directory, url = Path(temporary), BrokerUrl.parse(broker.url)
        site = Site(directory, broker, {"words": make_model("minilm", directory / "words", 3)})
        spawned, topic = multiprocessing.get_context("spawn"), Topics(SITE).heartbeat(DEVICES[-1])
        started, stop = spawned.Event(), spawned.Event()
        try:
            site.planner()
            for name in DEVICES:
                site.agent(name)
            with Hepti.connect(broker.url, site=SITE, client_id="other") as hepti:
                hepti.wait_ready("words", PATIENCE_S)
                waits(hepti, QUIET_S / 2)
                quiet = waits(hepti, QUIET_S)
                heartbeat = heartbeat_of(url, topic)
                loud = spawned.Process(target=flood, args=(url, topic, heartbeat, args.rate, started, stop))
                loud.start()
                try:
                    assert started.wait(PATIENCE_S)
                    flooded = waits(hepti, args.seconds)
                finally:
                    stop.set()
                    loud.join()
        finally:
            site.close()
    for name, took in (("before the flood", quiet), ("during the flood", flooded)):
        print(f"{name}: {len(took)} answers, median {1e3 * statistics.median(took):.0f} ms, worst {max(took):.2f} s")
    return int(statistics.median(flooded) > MEDIAN_S or max(flooded) > WORST_S)


if __name__ == "__main__":
    sys.exit(main())
