"""What holds for every test."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from broker_kinds import NEEDS_MOSQUITTO

# No test may fail because the machine was busy.
hypothesis.settings.register_profile("hepti", deadline=None)
hypothesis.settings.load_profile("hepti")

pytest_plugins = ["stories"]

# Where no bytecode is written, as in many containers, every process that a test starts compiles all modules again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Searches for garbage took a quarter of the time: nothing that is collected or imported ever is any.
gc.disable()
GARBAGE = (100_000, 10, 1000)  # thresholds of `gc`

# A suite that is started in the background, or by nohup, ignores these signals, and so would every process that a test
# starts and then interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

SITE, NIGHTLY = (Path(__file__).parent / tier for tier in ("site", "nightly"))

# A change is tried on a part of each property's examples; `make test-all` tries all of them.
PART_OF_EXAMPLES, LEAST_EXAMPLES = 3, 5

# Files whose tests take longest: what is begun last should be short, or one worker waits for the others.
LONG = (
    *("test_faults.py", "test_service_site.py", "test_cli_site.py", "test_integration_tiles.py"),
    *("test_strategies_contract.py", "test_planner_search.py", "test_lowering_tables.py"),
)

# What of tests/site starts no broker, so that nothing of it depends on which is installed.
NO_BROKER = {
    path
    for pattern in (
        *("cli/test_cli_offline.py", "cli/test_cli_show.py", "deployment/*.py", "kernels/*.py"),
        *("service/test_service_requests.py", "service/test_service_solver.py"),
        *("transport/test_endpoint.py", "transport/test_mesh*.py", "transport/test_peer.py"),
    )
    for path in SITE.glob(pattern)
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their tiers and brokers, and try fewer examples of each property."""
    _mix_tiers(items)
    for item in items:
        if _is_alike(item):
            item.add_marker(pytest.mark.any_broker)
        if NIGHTLY in item.path.parents:
            item.add_marker(pytest.mark.nightly)
        if not os.environ.get("HEPTI_ALL_EXAMPLES") and hypothesis.is_hypothesis_test(getattr(item, "obj", None)):
            _fewer_examples(item.obj)


def pytest_collection_finish() -> None:
    """Search for garbage from now on, among what tests make."""
    gc.freeze()
    gc.set_threshold(*GARBAGE)
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in one line how many tests were skipped for want of Mosquitto."""
    skipped = terminalreporter.getreports("skipped")
    count = sum(isinstance(r.longrepr, tuple) and NEEDS_MOSQUITTO in r.longrepr[2] for r in skipped)
    if count:
        terminalreporter.write_line(f"{count} tests need Mosquitto: apt install mosquitto")


def _mix_tiers(items: list[pytest.Item]) -> None:
    """Begin with what takes longest, and with files that wait beside files that compute."""
    files = sorted(dict.fromkeys(item.path for item in items), key=lambda path: path.name not in LONG)
    tiers = [[path for path in files if of in path.parents] for of in (SITE, NIGHTLY)]
    tiers.append([path for path in files if path not in {*tiers[0], *tiers[1]}])
    place = {path: (i + 0.5) / len(tier) for tier in tiers for i, path in enumerate(tier)}
    items.sort(key=lambda item: place[item.path])


def _is_alike(item: pytest.Item) -> bool:
    """Return whether a test does the same whichever broker is installed: it starts none, or names amqtt."""
    params = item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
    return item.path in NO_BROKER or any(isinstance(value, str) and value == "amqtt" for value in params)


def _fewer_examples(test: Any) -> None:
    function = getattr(test, "__func__", test)
    if getattr(function, "fewer_examples", False):
        return  # another case of the same test
    function.fewer_examples = True
    asked = function._hypothesis_internal_use_settings
    fewer = max(LEAST_EXAMPLES, asked.max_examples // PART_OF_EXAMPLES)
    if fewer < asked.max_examples:
        function._hypothesis_internal_use_settings = hypothesis.settings(asked, max_examples=fewer)
