"""The kernels' benchmark: check first, then warm up, then time what alternates.

Every thread count is a process of its own, because BLAS reads its number of threads when NumPy is imported; what
several threads of ours gain over one is measured in another, where no rival has threads. Each case is appended to a
file of JSON lines as soon as it is measured; a later run of the same software on the same machine goes on where the
file ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from hepti_mqtt.bench import kernel_report
from hepti_mqtt.bench.kernel_cases import PASSES, SINGLE, THREADS, Case, Conditions, cases, measure
from hepti_mqtt.bench.kernel_options import Options
from hepti_mqtt.bench.provenance import provenance
from hepti_mqtt.errors import BenchError, HeptiError
from hepti_mqtt.kernels import Workers, warm_up

LINES: Final = "kernels.jsonl"
_THREAD_VARIABLES: Final = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
_RIVALS_SETTINGS: Final = ("OPENBLAS_", "MKL_", "ONEDNN_", "DNNL_", "ATEN_")
_ROUNDS, _QUICK_ROUNDS = 9, 5


@dataclass(frozen=True, slots=True)
class Results:
    """All records of the file, the provenance that they share, and how many cases are not measured yet."""

    records: tuple[Mapping[str, Any], ...]
    provenance: Mapping[str, Any]
    missing: int


def run(options: Options) -> Results:
    """Measure what is missing, and write the report beside the lines; return everything.

    Raises BenchError if a kernel or a rival computes wrongly, or if the file is another machine's or software's.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    stop = None if options.seconds is None else time.monotonic() + options.seconds
    for threads in options.threads:
        for only in _sittings(options.only, threads):
            left = None if stop is None else stop - time.monotonic()
            if left is None or left > 0:
                _in_own_process(replace(options, threads=(threads,), only=only, seconds=left))
    results = _results(options)
    kernel_report.write(results.records, results.provenance, options.out)
    return results


def _sittings(groups: Sequence[str], threads: int) -> list[tuple[str, ...]]:
    """Return what each process measures: the groups with rivals, and the one without, which needs several threads."""
    beside_rivals = tuple(group for group in groups if group != THREADS)
    alone = (THREADS,) if THREADS in groups and threads > 1 else ()
    return [only for only in (beside_rivals, alone) if only]


def _in_own_process(options: Options) -> None:
    said = {**asdict(options), "out": str(options.out)}
    # Beside our own threads alone, NumPy may not keep any: those of its BLAS spin after the check of the results.
    threads = 1 if options.only == (THREADS,) else options.threads[0]
    # Rivals choose their own code: an inherited setting such as OPENBLAS_CORETYPE=Haswell would halve their speed.
    untuned = {name: value for name, value in os.environ.items() if not name.startswith(_RIVALS_SETTINGS)}
    environment = {**untuned, **dict.fromkeys(_THREAD_VARIABLES, str(threads))}
    done = subprocess.run(
        [sys.executable, "-m", "hepti_mqtt.bench.kernels", json.dumps(said)],
        env=environment,
        check=False,
        stderr=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise BenchError(done.stderr.strip() or f"the measuring process ended with {done.returncode}; run it again")


def _measure_all(options: Options) -> None:
    (threads,) = options.threads
    lines = options.out / LINES
    origin = {**provenance(), "seed": options.seed, "rounds": _QUICK_ROUNDS if options.quick else _ROUNDS}
    known = _load(lines)
    for record in known[:1]:
        if record["provenance"] != origin:
            raise BenchError(
                f"{lines} was measured by other software, on another machine or with another seed: "
                f"{_difference(record['provenance'], origin)}; choose another --out, or remove the file"
            )
    done = {_step(r) for r in known}
    warm_up()
    stop = None if options.seconds is None else time.monotonic() + options.seconds
    alone = options.only == (THREADS,)
    if alone and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    pools = {"ours": Workers(threads), **({SINGLE: Workers(1)} if alone else {})}
    try:
        for case, number in _steps(options, threads):
            if (case.key, threads, number) in done:
                continue
            if stop is not None and time.monotonic() > stop:
                return
            conditions = Conditions(threads, int(origin["rounds"]) // _passes(options, case.group), options.seed)
            found = measure(case, conditions, pools)
            record = {**found, "pass": number, "provenance": origin, "command": options.command}
            with lines.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
    finally:
        for pool in pools.values():
            pool.close()


def _passes(options: Options, group: str) -> int:
    return 1 if options.quick else PASSES.get(group, 1)


def _steps(options: Options, threads: int) -> list[tuple[Case, int]]:
    """Return every case with the number of the pass: first all cases once, then those that have more passes."""
    chosen = list(cases(options.only, options.quick, options.seed, threads))
    most = max((_passes(options, case.group) for case in chosen), default=0)
    return [(case, number) for number in range(most) for case in chosen if number < _passes(options, case.group)]


def _step(record: Mapping[str, Any]) -> tuple[str, int, int]:
    return record["key"], record["threads"], record["pass"]


def merged(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one record for each case: the samples of its passes in one list, the time that all of them took."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for record in records:
        known = found.get(_step(record)[:2])
        if known is None:
            found[_step(record)[:2]] = deepcopy(dict(record))
            continue
        known["elapsed_s"] += record["elapsed_s"]
        for name, samples in record["seconds"].items():
            known["seconds"][name] += samples
        for name, roof in record.get("roofs", {}).items():
            mine = known["roofs"][name]
            # As fast as before, in the amount of the first pass: a loop may be twice as long in the next one.
            mine["seconds"] += [s * mine["amount"] / roof["amount"] for s in roof["seconds"]]
    return list(found.values())


def _results(options: Options) -> Results:
    records = _load(options.out / LINES)
    if not records:
        raise BenchError(
            f"nothing was measured of {', '.join(options.only)}: give --seconds more where it is given, and for the "
            f"group {THREADS} --threads 2 or more"
        )
    done = {_step(r) for r in records}
    wanted = {(case.key, threads, n) for threads in options.threads for case, n in _steps(options, threads)}
    return Results(tuple(merged(records)), records[0]["provenance"], len({w[:2] for w in wanted - done}))


def _load(lines: Path) -> list[dict[str, Any]]:
    """Return the records of a file; a last line that was cut off in writing is dropped from it."""
    if not lines.exists():
        return []
    data = lines.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        lines.write_bytes(whole)
    try:
        return [json.loads(line) for line in whole.splitlines()]
    except ValueError as error:
        raise BenchError(f"{lines} is damaged ({error}); remove it, or choose another --out") from error


def _difference(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {was.get(key)} then, {now[key]} now" for key in now if was.get(key) != now[key])


def _main(said: str) -> int:
    fields = json.loads(said)
    options = Options(
        **{**fields, "out": Path(fields["out"]), "threads": tuple(fields["threads"]), "only": tuple(fields["only"])}
    )
    try:
        _measure_all(options)
    except HeptiError as error:
        sys.stderr.write(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
