"""Control groups of version 2 on a real kernel: Linux in user mode (Debian: user-mode-linux), on this machine's files.

Machines have one version or the other; a kernel of its own has the second one anywhere, without touching this one's.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.wide

ROOT = Path(__file__).parents[2]
BOOT_S = 180.0
INIT = """#!/bin/sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin PYTHONDONTWRITEBYTECODE=1 PYTHONPATH={root}
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t cgroup2 none /sys/fs/cgroup
echo BOOTED
{python} {root}/tests/lab/on_cgroup2.py
echo o > /proc/sysrq-trigger
sleep 60
"""


@pytest.fixture
def said(tmp_path: Path) -> str:
    """Return what the kernel and the script inside it said; skips where there is none or it cannot start."""
    linux = shutil.which("linux.uml")
    if linux is None:
        pytest.skip("no Linux in user mode here (Debian, Ubuntu: apt install user-mode-linux)")
    init = tmp_path / "init"
    init.write_text(INIT.format(root=ROOT, python=sys.executable))
    init.chmod(0o755)
    tmp_path.chmod(0o755)
    files = ["root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro"]
    command = [linux, "mem=384M", *files, f"init={init}", "con=null", "con0=null,fd:1", f"uml_dir={tmp_path}/"]
    kernel = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True)
    try:
        out, _ = kernel.communicate(timeout=BOOT_S)
    except subprocess.TimeoutExpired:
        out = b""
    finally:
        if kernel.poll() is None:
            os.killpg(kernel.pid, signal.SIGKILL)  # with every process that stands for one inside
            kernel.communicate()
    text = out.decode(errors="replace")
    if "BOOTED" not in text:
        pytest.skip(f"Linux in user mode does not start here: {text[-300:]}")
    return text


def test_quotas_and_limits_on_a_real_hierarchy_of_version_2(said: str) -> None:
    lines = [line.partition("SEEN ")[2] for line in said.splitlines() if "SEEN " in line]
    assert lines, said[-3000:]
    seen = json.loads(lines[0])
    assert seen["version"] == 2
    assert seen["memory"], "both controllers in one place"
    free, tenth, half, again = seen["throttled"]
    assert (free, again) == (0, 0)
    assert tenth > half > 0, "the smaller quota stands still for longer"
    assert (seen["small"], seen["large"]) == (0, -9), "the kernel ends what holds more than the limit"
    assert seen["members"]
    assert seen["left"] == []
