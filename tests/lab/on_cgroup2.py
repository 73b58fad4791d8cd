"""Run by test_lab_cgroups_v2 as root of a kernel with control groups of version 2; prints JSON of what it saw there."""

import json
import os
import subprocess
import sys
import threading

from hepti_mqtt.lab.cgroups import Group, remove, this_machine

MIB = 2**20
ENTER = "import os, sys\nfor path in sys.argv[1:]:\n    with open(path, 'w') as file: file.write(str(os.getpid()))\n"
SPIN = "import time\nuntil = time.process_time() + 0.2\nwhile time.process_time() < until: pass"
HOLD = "held = bytearray({mib} << 20)\nfor i in range(0, len(held), 4096): held[i] = 1"


def start(group: Group, code: str) -> subprocess.Popen[bytes]:
    """Start Python, which goes into the group before anything else."""
    entrances = [str(path) for path in group.entrances]
    command = [sys.executable, "-S", "-c", ENTER + code, *entrances]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def throttled(group: Group) -> int:
    """Return for how many microseconds the group stood still, its quota used up, while 0.2 s were computed."""
    stat = group.directories[0] / "cpu.stat"

    def still_us() -> int:
        words = dict(line.split() for line in stat.read_text().splitlines())
        return int(words["throttled_usec"])

    before = still_us()
    assert start(group, SPIN).wait() == 0
    return still_us() - before


def main() -> None:
    """Use a group as the lab does, and print what the kernel made of it."""
    controllers = this_machine()
    group = Group(controllers, "lab", "pi1", 48 * MIB)
    group.make()
    seen = {"version": controllers.version, "memory": controllers.memory == controllers.cpu, "throttled": []}
    for cores in (None, 0.1, 0.5, None):
        group.set_cpu(cores)
        seen["throttled"].append(throttled(group))
    seen["small"], seen["large"] = (start(group, HOLD.format(mib=mib)).wait() for mib in (8, 200))
    sleeper = start(group, "import time; print(flush=True); time.sleep(1000)")
    assert sleeper.stdout is not None
    sleeper.stdout.readline()  # it is inside
    seen["members"] = group.processes() == [sleeper.pid]
    threading.Thread(target=sleeper.wait).start()
    remove(group.directories, lambda pid: os.kill(pid, 9))
    seen["left"] = [path.name for path in controllers.cpu.glob("hepti*")]
    print("SEEN " + json.dumps(seen), flush=True)


if __name__ == "__main__":
    main()
