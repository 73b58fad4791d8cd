"""Starts of a site of three models on three agents with little memory, while other processes compute.

`make test-starts STARTS=20` prints the seconds from the last agent's start until all models have answered; the exit
code is 1 if a model has not after `WITHIN_S`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image
from site_processes import SITE, Site

from hepti_mqtt.checkpoint import make_model
from hepti_mqtt.client import Hepti
from hepti_mqtt.embedded_broker import start_broker
from hepti_mqtt.errors import HeptiError

DEVICES = ("a", "b", "c")
MEMORY = "900MiB"  # two of the models at most
KINDS = {"words": "minilm", "large": "bert-base", "seen": "vit-base"}
WITHIN_S = 60.0
BUSY = 2


def questions(directory: Path) -> dict[str, dict[str, object]]:
    """Return a request for each model."""
    picture = directory / "picture.png"
    Image.new("RGB", (32, 32), (90, 120, 30)).save(picture)
    return {"words": {"ids": [7, 8, 9]}, "large": {"ids": [7, 8, 9]}, "seen": {"image": picture.read_bytes()}}


def start_once(directory: Path, models: Mapping[str, Path], requests: Mapping[str, dict[str, object]]) -> float | str:
    """Return the seconds until all models have answered, or which one has not, and why."""
    directory.mkdir()
    with start_broker() as broker:
        site = Site(directory, broker, models)
        try:
            site.planner()
            for name in DEVICES:
                site.agent(name, MEMORY)
            begun = time.monotonic()
            with Hepti.connect(broker.url, site=SITE, client_id="starter") as hepti:
                hepti.wait_ready(next(iter(models)), 2 * WITHIN_S)  # an agent measures its host before it is online
                able = time.monotonic()
                for name, request in requests.items():
                    while True:
                        try:
                            hepti.infer(name, timeout_s=WITHIN_S, **request)
                            break
                        except HeptiError as error:
                            if time.monotonic() - able > WITHIN_S:
                                return f"{name}: {error.code}: {error}"
                            time.sleep(0.5)  # until the next attempt of a user
            return time.monotonic() - begun
        except HeptiError as error:
            return f"{error.code}: {error}"
        finally:
            site.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=20)
    args = parser.parse_args(arguments)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY)]
    failed = 0
    try:
        with tempfile.TemporaryDirectory(prefix="hepti-starts-") as temporary:
            directory = Path(temporary)
            models = {name: make_model(kind, directory / name, 3) for name, kind in KINDS.items()}
            requests = questions(directory)
            for number in range(args.starts):
                took = start_once(directory / f"start-{number}", models, requests)
                failed += isinstance(took, str)
                print(f"start {number + 1}: {took if isinstance(took, str) else f'{took:.1f} s'}", flush=True)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    print(f"{args.starts - failed} of {args.starts} sites served all models")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
