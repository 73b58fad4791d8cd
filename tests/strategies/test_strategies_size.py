"""Methods stay tables: what solves for shares lies below them, in `hepti_mqtt/shares/`."""

from __future__ import annotations

from pathlib import Path

from hepti_mqtt.strategies import STRATEGIES, registry

HERE = Path(registry.__file__).parent
LINES = {path.stem: len(path.read_text("utf-8").splitlines()) for path in HERE.glob("*.py")}
MOST = 40
TOGETHER, METHODS = 900, 18  # lines of the directory with so many methods; each further one has its own


def test_every_method_is_a_short_table():
    assert set(STRATEGIES) <= set(LINES)
    assert {name: LINES[name] for name in STRATEGIES if LINES[name] > MOST} == {}


def test_all_methods_together_are_short():
    assert sum(LINES.values()) <= TOGETHER + MOST * max(len(STRATEGIES) - METHODS, 0)
