"""`python shifted_clock.py FILE ARGUMENTS`: `hepti ARGUMENTS` whose wall clock is as many seconds ahead as FILE says.

What Python says of the time is shifted, and FILE may change at any time; certificates and files keep the true time.
"""

from __future__ import annotations

import datetime
import runpy
import sys
import time
from pathlib import Path
from typing import Any

_shift_file = Path(sys.argv.pop(1))
_true_time = time.time


def ahead_s() -> float:
    return float(_shift_file.read_text() or 0)


class ShiftedDatetime(datetime.datetime):
    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return super().now(tz) + datetime.timedelta(seconds=ahead_s())


time.time = lambda: _true_time() + ahead_s()
time.time_ns = lambda: int(time.time() * 1e9)
datetime.datetime = ShiftedDatetime

if __name__ == "__main__":
    sys.argv[0] = "hepti"
    runpy.run_module("hepti_mqtt.cli", run_name="__main__", alter_sys=True)
