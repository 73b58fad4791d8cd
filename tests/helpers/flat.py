"""What processes hold while a site works: samples of each, and the rule by which they are flat."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import psutil

MIB = 1 << 20


@dataclass(frozen=True)
class Flat:
    """How much a process may grow from the second quarter of a run to the last, beside noise.

    Bytes, or that part of what it had; descriptors and threads.
    """

    nbytes: int = 6 * MIB
    part: float = 0.03
    descriptors: int = 2
    threads: int = 1


@dataclass
class Held:
    """Samples of one process: seconds, resident bytes, descriptors, threads. most_bytes: what is configured for it."""

    pid: int
    most_bytes: float = float("inf")
    samples: list[tuple[float, int, int, int]] = field(default_factory=list)

    def look(self, now: float) -> None:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process = psutil.Process(self.pid)
            with process.oneshot():
                numbers = process.memory_info().rss, process.num_fds(), process.num_threads()
            self.samples.append((now, *numbers))

    def quarter(self, which: int) -> tuple[float, float, float]:
        """Return the medians of bytes, descriptors and threads in a quarter of the run, 0 to 3."""
        table = np.array(self.samples)
        begin, end = table[0, 0], table[-1, 0]
        place = np.clip((table[:, 0] - begin) / (end - begin) * 4, 0, 3.999).astype(int)
        return tuple(np.median(table[place == which, 1:], axis=0))

    def slope(self) -> float:
        """Return the growth of the second half, bytes per hour, by least squares."""
        table = np.array(self.samples)
        late = table[table[:, 0] >= (table[0, 0] + table[-1, 0]) / 2]
        return float(np.polyfit(late[:, 0], late[:, 1], 1)[0]) * 3600

    def wrong(self, name: str, flat: Flat) -> Iterator[str]:
        """Yield what is not flat, or beyond what is configured."""
        (before, *counts), (after, *later) = self.quarter(1), self.quarter(3)
        if after - before > max(flat.nbytes, flat.part * before):
            yield f"{name} grew from {before / MIB:.1f} to {after / MIB:.1f} MiB"
        for what, some, more, room in zip(
            ("descriptors", "threads"), counts, later, (flat.descriptors, flat.threads), strict=True
        ):
            if more - some > room:
                yield f"{name} had {some:.0f} {what}, and {more:.0f} at the end"
        if (most := max(sample[1] for sample in self.samples)) > self.most_bytes:
            yield f"{name} held {most / MIB:.1f} MiB where {self.most_bytes / MIB:.1f} are configured"


def table(held: Mapping[str, Held]) -> str:
    """Return what processes held, one line for each."""
    lines = ["process        MiB in quarters 1 to 4              most  MiB/h late   descriptors   threads"]
    for name, each in held.items():
        quarters = [each.quarter(n) for n in range(4)]
        rss = "".join(f"{q[0] / MIB:9.1f}" for q in quarters)
        most = max(sample[1] for sample in each.samples) / MIB
        counts = [f"{quarters[0][n]:.0f} to {quarters[3][n]:.0f}" for n in (1, 2)]
        lines.append(f"{name:11}{rss}{most:10.1f}{each.slope() / MIB:12.1f}{counts[0]:>14}{counts[1]:>10}")
    return "\n".join(lines)


def watch(held: Mapping[str, Held]) -> None:
    """Take one sample of every process."""
    now = time.monotonic()
    for each in held.values():
        each.look(now)
