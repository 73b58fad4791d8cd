"""A result file: JSON lines, a header first, then one record per turn of a cell, resumable after a cut."""

from __future__ import annotations

import csv
import json
import statistics
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from hepti_mqtt.bench.experiment import Cell
from hepti_mqtt.bench.plays import Play
from hepti_mqtt.bench.statistics import Interval, median_interval
from hepti_mqtt.errors import ConfigError

FORMAT: Final = 1
FILE: Final = "results.jsonl"
_SAME: Final = ("experiment", "digest", "machine", "python", "versions", "revision")
_COLUMNS: Final = (
    *(
        "lab",
        "rate",
        "model",
        "tokens",
        "strategy",
        "devices",
        "wire",
        "route",
        "weights",
        "requests",
        "objective",
        "copy",
        "round",
        "repetition",
        "latency_ms",
    ),
    *("compute_ms", "wait_ms", "bytes", "predicted_ms", "expected_ms", "error", "failure"),
)


@dataclass(frozen=True)
class Results:
    """What a file holds. records: of kinds `lab`, `turn` and those of a `Play`, as they came."""

    header: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]

    def turns(self) -> list[Mapping[str, Any]]:
        """Return the timed turns, those that failed included."""
        return [r for r in self.records if r["record"] == "turn"]

    def cells(self) -> dict[str, Cell]:
        """Return the cells that have turns, by id, in order of their first one."""
        return {r["cell"]: cell_of(r["of"]) for r in self.turns()}

    def medians(self, cell: str) -> dict[int, float]:
        """Return round -> median latency in ms of a cell, without rounds that failed."""
        return {r["round"]: statistics.median(r["latency_ms"]) for r in self.turns() if r["cell"] == cell and r["ok"]}

    def intervals(self) -> dict[str, Interval]:
        """Return the median of every cell that has times, over its rounds, in ms."""
        medians = {cell: self.medians(cell) for cell in self.cells()}
        return {cell: median_interval(list(m.values())) for cell, m in medians.items() if m}

    def plays(self) -> dict[str, Play]:
        """Return the last play of every cell that was watched while a script changed the lab."""
        plays: dict[str, Play] = {}
        for r in self.records:
            if r["record"] == "play":
                plays[r["cell"]] = Play(cell_of(r["of"]), r["unix_s"])
            elif r["record"] in ("under_change", "change"):
                play = plays[r["cell"]]
                (play.changes if r["record"] == "change" else play.requests).append(r)
            elif r["record"] == "played":
                plays[r["cell"]].whole = True
        return plays

    def done(self) -> set[tuple[str, int]]:
        """Return (cell, round) of every turn."""
        return {(r["cell"], r["round"]) for r in self.turns()}


def cell_of(data: Mapping[str, Any]) -> Cell:
    """Return the cell that a record was made from."""
    return Cell(**{**data, "devices": tuple(data["devices"])})


def read(path: Path) -> Results:
    """Return a result file or that of a directory; a last line that was cut off is left out.

    Raises ConfigError for a file that cannot be read, is none, or is of another version.
    """
    file = path / FILE if path.is_dir() else path
    try:
        lines = file.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    try:
        found = [json.loads(line) for line in lines]
        header = found[0]
        version = header["format"] if header["record"] == "header" else None
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{file} is no result of `hepti bench`, or is damaged: {error}") from error
    if version != FORMAT:
        raise ConfigError(f"{file} is of format {version}, this is {FORMAT}; read it with the Hepti that wrote it")
    return Results(header, found[1:])


class Writer:
    """Appends records to the result file of a directory; a context manager.

    With `resume` goes on with a file that is there, which must be of the same experiment and machine state.
    """

    def __init__(self, directory: Path, header: Mapping[str, Any], *, resume: bool) -> None:
        self.path, full = directory / FILE, {"record": "header", "format": FORMAT, **header}
        self.results = Results(full, [])
        self._lock = threading.Lock()  # changes are written by the thread that makes them
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                self._go_on(full, resume)
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {self.path}: {error.strerror or error}; choose another --out") from error
        if not self.path.stat().st_size:
            self._line(full)

    def _go_on(self, header: Mapping[str, Any], resume: bool) -> None:
        if not resume:
            raise ConfigError(f"{self.path} exists; add --resume to go on with it, or choose another --out")
        data = self.path.read_bytes()
        if b"\n" not in data:  # cut off within the header: nothing was measured
            self.path.write_bytes(b"")
            return
        self.results = read(self.path)
        there = self.results.header
        other = [f"{k} ({there.get(k)}, now {header.get(k)})" for k in _SAME if there.get(k) != header.get(k)]
        if other:
            raise ConfigError(
                f"{self.path} has another {', another '.join(other)}: its times and new ones do not belong in one "
                "table; start anew with another --out (what is in this one stays), or go back to what it was made with"
            )
        with self.path.open("r+b") as file:
            file.truncate(data.rfind(b"\n") + 1)

    def add(self, kind: str, /, **fields: Any) -> None:
        """Append a record; it is in the file when this returns."""
        self._line({"record": kind, **fields})

    def turn(self, cell: Cell, number: int, answer: Mapping[str, Any]) -> None:
        """Append what the driver said of a cell in a round."""
        self.add("turn", cell=cell.id, of=asdict(cell), round=number, **answer)

    def _line(self, record: Mapping[str, Any]) -> None:
        with self._lock:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def write_csv(results: Results, path: Path) -> None:
    """Write one row per timed request (or per turn that failed)."""
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(_COLUMNS)
        for r in results.turns():
            for place, latency in enumerate(r["latency_ms"] if r["ok"] else [None]):
                row = {**r["of"], **r, "devices": " ".join(r["of"]["devices"]), "repetition": place}
                row.update(latency_ms=latency, failure=r.get("message"))
                table.writerow([row.get(column) for column in _COLUMNS])
