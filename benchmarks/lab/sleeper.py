"""A real-time program that sleeps: `python sleeper.py CPU PARENT` (PARENT 0: until it is killed).

The kernel charges a group's CPU time when its clock ticks (250 Hz) or when another task is scheduled. With ticks alone
a quota of 1 ms runs for up to 4 ms and then stalls for tens. Waking on the core every half millisecond, before
everything else, makes the kernel charge that often, for about 4 % of the core.
"""

from __future__ import annotations

import os
import sys
import time

_PAUSE_S = 0.5e-3
_PRIORITY = 50
_LOOKS_AFTER = 2000  # pauses between two looks whether the parent still lives


def main() -> None:
    """Sleep for ever on one core."""
    cpu, parent = int(sys.argv[1]), int(sys.argv[2])
    os.sched_setaffinity(0, {cpu})
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sleep = time.sleep
    while not parent or os.getppid() == parent:
        for _ in range(_LOOKS_AFTER):
            sleep(_PAUSE_S)


if __name__ == "__main__":
    main()
