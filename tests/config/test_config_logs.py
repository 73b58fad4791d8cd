"""What is logged: our own words in detail, nobody else's; the same words once, with how often they came."""

from __future__ import annotations

import logging

import pytest

from hepti_mqtt.config.process import EVERY_S, REMEMBERED, SparingFilter, setup_logging


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(self.format(record))


@pytest.fixture
def log():
    """A logger of its own whose lines are kept, with a clock that the test turns."""
    handler, logger = Lines(), logging.getLogger("hepti.test-logs")
    logger.now = 0.0
    handler.addFilter(SparingFilter(handler, lambda: logger.now))
    logger.propagate, logger.handlers = False, [handler]
    logger.setLevel(logging.INFO)
    logger.lines = handler.lines
    yield logger
    logger.handlers, logger.propagate = [], True


def test_the_same_line_comes_once_and_is_counted(log):
    for _ in range(330):
        log.info("%s: %s", "overloaded", "64 requests wait")
    log.info("joined: a has joined")
    assert log.lines == ["overloaded: 64 requests wait", "joined: a has joined"]
    log.now = EVERY_S
    log.info("joined: b has joined")
    assert log.lines[2:] == ["overloaded: 64 requests wait (329 more like it in 10 s)", "joined: b has joined"]
    log.info("overloaded: 64 requests wait")
    assert log.lines[-1] == "overloaded: 64 requests wait"


def test_lines_that_differ_all_come(log):
    for device in range(2 * REMEMBERED):
        log.info("pi-%d has joined", device)
    log.warning("pi-0 has joined")
    assert len(log.lines) == 2 * REMEMBERED + 1


def test_what_comes_slowly_is_never_held_back(log):
    for second in range(5):
        log.now = second * EVERY_S
        log.info("still here")
    assert log.lines == ["still here"] * 5


def test_verbose_is_about_ourselves(monkeypatch):
    root = logging.getLogger()
    levels = {name: logging.getLogger(name).level for name in ("", "hepti", "hepti_mqtt", "device_agent")}
    handler = Lines()
    monkeypatch.setattr(root, "handlers", [])
    try:
        setup_logging(handler, "%(name)s", verbose=True)
        for name in ("hepti.agent", "hepti_mqtt.runtime", "device_agent", "numba.core.ssa", "PIL"):
            logging.getLogger(name).debug("word")
        assert handler.lines == ["hepti.agent", "hepti_mqtt.runtime", "device_agent"]
        root.handlers = []
        setup_logging(handler, "%(name)s")
        logging.getLogger("hepti.agent").debug("other word")
        logging.getLogger("numba").warning("other word")
        assert handler.lines[3:] == ["numba"]
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
