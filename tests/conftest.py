"""What holds for every test."""

from __future__ import annotations

import signal

pytest_plugins = ["stories"]

# A suite that is started in the background, or by nohup, ignores these signals, and so would every process that a test
# starts and then interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
