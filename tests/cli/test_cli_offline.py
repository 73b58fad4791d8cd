"""The command line without a broker: help, usage, models and simulations."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_onnx import small_net

from hepti_mqtt.cli.main import _ENTRY_POINTS, main

ROOT = Path(__file__).resolve().parents[2]
PAIR = ROOT / "configs" / "sites" / "paper-pair.yaml"  # a search that takes a moment
SITES = sorted((ROOT / "configs" / "sites").glob("*.yaml"))
ESCAPE = "\x1b"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEPTI_BROKER", "HEPTI_SITE"):
        monkeypatch.delenv(name, raising=False)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of `hepti ARGUMENTS`."""
    try:
        code = main(arguments)
    except SystemExit as end:  # argparse
        code = int(end.code or 0)
    said = capsys.readouterr()
    return code, said.out, said.err


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert all(re.search(rf"^ +{name} ", out, re.MULTILINE) for name in _ENTRY_POINTS)


@pytest.mark.parametrize("command", [*_ENTRY_POINTS, "model make", "model inspect", "model verify"])
def test_every_command_explains_every_argument(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, out, err = run(capsys, *command.split(), "--help")
    assert (code, err) == (0, "")
    entries = re.findall(r"^  (\S.*(?:\n {4,}\S.*)*)", out[out.index("\n\n") :], re.MULTILINE)
    assert [e for e in entries if len(re.split(r"\s{2,}|\n", e)) < 2] == [], "an argument without a word about it"


@pytest.mark.parametrize("command", [c for c in _ENTRY_POINTS if c != "model"])
def test_every_command_takes_the_common_options(capsys: pytest.CaptureFixture[str], command: str) -> None:
    _, out, _ = run(capsys, command, "--help")
    assert {"--broker", "--site", "--json"} <= set(re.findall(r"--[a-z]+", out))


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "nosuch",
        "infer m",
        "infer m --tokens 0",
        "infer m --tokens 5 --text x",
        "infer m --tokens 5 --repeat -1",
        "infer m --tokens 5 --timeout 0",
        "infer m --tokens 5 --wire f64",
        "infer m --tokens 5 --accuracy 2",
        "planner",
        "planner --model nodirectory",
        "planner --model m=d --broker-mbit 0",
        "agent",
        "agent --id a --memory much",
        "model",
        "model make",
        "simulate bert-base",
        "broker --kind nosuch",
        "devices --site a/b",
        "devices",  # no broker
    ],
)
def test_usage_errors_end_with_2(capsys: pytest.CaptureFixture[str], arguments: str) -> None:
    code, out, err = run(capsys, *arguments.split())
    assert (code, out) == (2, "")
    assert err
    assert "Traceback" not in err


def test_no_broker_says_how_to_name_one(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "devices", "--json")
    error = json.loads(out)["error"]
    assert code == 2
    assert error["code"] == "config"
    assert "HEPTI_BROKER" in error["message"]


@pytest.mark.parametrize("command", ["devices", "plan", "infer m --tokens 3"])
def test_an_absent_broker_ends_with_3(capsys: pytest.CaptureFixture[str], free_port: int, command: str) -> None:
    code, out, err = run(capsys, *command.split(), "--broker", f"mqtt://127.0.0.1:{free_port}")
    assert (code, out) == (3, "")
    assert f"127.0.0.1:{free_port}" in err
    assert len(err.splitlines()) == 1, "one sentence, not broken into lines where no terminal is"


def test_broker_and_site_come_from_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    monkeypatch.setenv("HEPTI_BROKER", f"mqtt://someone:secret@127.0.0.1:{free_port}")
    code, _, err = run(capsys, "devices")
    assert code == 3
    assert "secret" not in err
    monkeypatch.setenv("HEPTI_SITE", "not/a-name")
    code, _, err = run(capsys, "devices")
    assert code == 2
    assert "not/a-name" in err


@pytest.fixture
def free_port() -> int:
    """A port on which nobody listens: it was free a moment ago, and nobody else asks for it."""
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


# -- models -----------------------------------------------------------------------------------------------------------


def test_make_inspect_verify(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    directory = tmp_path / "model"
    code, out, _ = run(capsys, "model", "--json", "make", "tiny-bert", "--out", str(directory), "--seed", "4")
    made = json.loads(out)
    assert (code, made["kind"], made["seed"], made["directory"]) == (0, "tiny-bert", 4, str(directory))
    assert made["bytes"] == sum(f.stat().st_size for f in directory.iterdir())
    code, out, _ = run(capsys, "model", "--json", "inspect", str(directory))
    found = json.loads(out)
    assert (code, found["architecture"], found["layers"], found["hidden"]) == (0, "BertModel", 3, 32)
    assert found["parameters"] * 4 <= made["bytes"]
    code, out, _ = run(capsys, "model", "--json", "verify", str(directory))
    assert code == 0
    assert json.loads(out)["max_abs_err"] < 2e-4


def test_model_as_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    directory = tmp_path / "model"
    code, out, _ = run(capsys, "model", "make", "tiny-vit", "--out", str(directory), "--layers", "1")
    assert code == 0
    assert str(directory) in out
    code, out, _ = run(capsys, "model", "inspect", str(directory))
    assert code == 0
    assert re.search(r"^layers +1$", out, re.MULTILINE)
    code, out, _ = run(capsys, "model", "verify", str(directory))
    assert code == 0
    assert "difference" in out


def test_make_with_wrong_arguments(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = run(capsys, "model", "make", "bert-huge", "--out", str(tmp_path / "x"))
    assert code == 2
    assert "bert-large" in err
    assert "tiny-vit" in err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    code, _, err = run(capsys, "model", "make", "tiny-bert", "--out", str(tmp_path / "full"))
    assert code == 2
    assert "not an empty directory" in err


@pytest.mark.parametrize("action", ["inspect", "verify"])
def test_a_directory_that_is_no_model(capsys: pytest.CaptureFixture[str], tmp_path: Path, action: str) -> None:
    code, out, err = run(capsys, "model", action, str(tmp_path))
    assert (code, out) == (1, "")
    assert "config.json" in err


# -- simulate ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "site",
    [p if p.stem in {"paper-pair", "mixed-four"} else pytest.param(p, marks=pytest.mark.wide) for p in SITES],
    ids=lambda path: path.stem,
)
def test_simulate_every_site(capsys: pytest.CaptureFixture[str], tmp_path: Path, site: Path) -> None:
    picture, layouts = tmp_path / "line.svg", tmp_path / "layouts.svg"
    common = ("simulate", "minilm", "--devices-file", str(site), "--tokens", "32")
    code, out, err = run(capsys, *common, "--json", "--svg", str(picture), "--layout-svg", str(layouts))
    found = json.loads(out)
    assert code == 0
    best = found["candidates"][0]
    assert best["feasible"]
    assert found["chosen"]["predicted_s"] * 1e3 == pytest.approx(best["predicted_ms"])
    assert {c["strategy"] for c in found["candidates"]} >= {"single", "row/kv", "column", "block"}
    assert 0.99 < found["work"]["factor"] < 1.25  # some methods compute a little twice instead of sending it
    assert "<svg" in picture.read_text()
    assert "32 tokens, layer 1" in layouts.read_text("utf-8")
    assert str(picture) in err
    assert str(layouts) in err
    code, out, _ = run(capsys, *common, "--explain", "--layer", "1:3", "--strategy", "row", "--variant", "heads")
    assert code == 0
    assert "work 1.00 of one device's" in out
    assert all(f"layer {layer}:" in out for layer in (1, 2))
    assert "row/heads" in out
    assert "row/kv" not in out
    assert all(device in out for device in found["chosen"]["devices"])
    assert "time line of 32 tokens" in out
    assert "latency alone" in out
    assert "with 2 in flight" in out
    assert re.search(r"routes of row/heads: over broker [\d.]+ ms .*; over mesh [\d.]+ ms", out)
    assert re.search(
        r"numbers on the wire: f32 [\d.]+ ms .*; f16 [\d.]+ ms .* times as fast; i8 [\d.]+ ms .* times as fast", out
    )
    assert ESCAPE not in out


def test_simulate_by_the_route_that_is_asked_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    common = ("simulate", "tiny-bert", "--strategy", "row", "--json", "--devices-file")
    for route, routes in (("broker", {"broker"}), ("mesh", {"mesh"}), ("auto", {"mesh"})):
        code, out, _ = run(capsys, *common, str(PAIR), "--route", route)
        assert code == 0
        assert {c["route"] for c in json.loads(out)["candidates"]} == routes
    apart = tmp_path / "apart.yaml"
    apart.write_text("defaults: {gflops: 1}\ndevices: {a: {}, b: {mesh: false}}\n")
    assert json.loads(run(capsys, *common, str(apart))[1])["chosen"]["route"] == "broker"
    out = run(capsys, *common[:4], "--explain", "--devices-file", str(apart))[1]
    assert "over mesh: no two of these devices can connect" in out


def test_simulate_tells_throughput_when_it_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    common = ("simulate", "tiny-bert", "--devices-file", str(PAIR), "--strategy", "single")
    code, out, _ = run(capsys, *common, "--requests", "9", "--in-flight", "3")
    assert code == 0
    assert "requests/s" in out
    assert "with 3 in flight; latency then" in out
    load = json.loads(run(capsys, *common, "--requests", "9", "--json")[1])["candidates"][0]["load"]
    assert (load["requests"], load["in_flight"]) == (9, 2)
    assert load["requests_per_s"] > 0
    code, out, _ = run(capsys, *common)
    assert code == 0
    assert "requests/s" not in out
    assert "load" not in json.loads(run(capsys, *common, "--json")[1])["candidates"][0]


def test_simulate_what_does_not_fit_ends_with_4(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = (ROOT / "configs" / "sites" / "paper-pair.yaml").read_text()
    small = tmp_path / "small.yaml"
    small.write_text(text.replace("memory_mib: 3000", "memory_mib: 10"))
    code, out, err = run(capsys, "simulate", "minilm", "--devices-file", str(small))
    assert (code, out) == (4, ""), err
    assert re.search(r"needs \d+\.\d MiB and has 10.0 MiB", err)


def test_simulate_an_onnx_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    net = small_net(tmp_path / "net.onnx")
    common = ("simulate", str(net), "--devices-file", str(PAIR), "--json")
    for arguments in ((), ("--accuracy", "0.1")):
        code, out, err = run(capsys, *common, *arguments)
        assert code == 0, out + err
        assert json.loads(out)["candidates"]


def test_simulate_with_wrong_arguments(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = run(capsys, "simulate", "bert-huge", "--devices-file", str(PAIR))
    assert code == 2
    assert "bert-large" in err
    code, _, err = run(capsys, "simulate", "minilm", "--devices-file", str(tmp_path / "none.yaml"))
    assert code == 2
    assert "none.yaml" in err
    code, _, err = run(capsys, "simulate", "minilm", "--devices-file", str(PAIR), "--strategy", "magic")
    assert code == 2
    assert "block" in err
    code, _, err = run(
        capsys, "simulate", "tiny-bert", "--devices-file", str(PAIR), "--svg", str(tmp_path / "no" / "x.svg")
    )
    assert code == 2
    assert "--svg" in err
    for wrong in ("2:2", "a", "1:b"):
        code, _, err = run(capsys, "simulate", "tiny-bert", "--devices-file", str(SITES[0]), "--layer", wrong)
        assert code == 2
        assert wrong in err


# -- pins that cannot be ----------------------------------------------------------------------------------------------


def test_more_devices_than_a_map_has_places_say_who_has_nothing_to_do_and_who_took_what(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    nine = tmp_path / "nine.yaml"
    nine.write_text("defaults: {gflops: 10}\ndevices: {" + ", ".join(f"d{i}: {{}}" for i in range(9)) + "}\n")
    asked = ["simulate", "tiny-vgg", "--devices-file", str(nine), "--devices", ",".join(f"d{i}" for i in range(9))]
    code, out, _ = run(capsys, *asked, "--strategy", "fused_tiles", "--variant", "none", "--explain")
    assert code == 0
    assert "nothing to do for d4, d5, d6, d7, d8" in out
    code, out, _ = run(capsys, *asked, "--strategy", "fused_tiles", "--variant", "none/leased", "--explain")
    assert code == 0
    assert "in this run task 0" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--strategy pipeline --variant kv", "pipeline has no option variant=kv; it has goal=throughput, goal=latency"),
        ("--strategy row --variant ring", "row has no option variant=ring; it has variant=kv, variant=heads"),
        ("--strategy two_d --variant 3x2", "two_d has no option variant=3x2 on 13 devices; there it has x=1, x=13"),
        ("--variant nonsense", "no strategy has the option variant=nonsense"),
        (
            "--strategy decoupled",
            "decoupled divides models with branches within a layer, which this one does not have; it takes a decoupled "
            "checkpoint, .*debert-base.*; .* can be divided by: single, row",
        ),
        ("--strategy fused_tiles", "fused_tiles divides models with feature maps, which this one does not have"),
        ("--strategy pipeline --devices " + ",".join(f"d{i}" for i in range(13)), "13 .*stages than the 12 parts of 3"),
    ],
)
def test_pins_that_cannot_be_are_refused_with_the_limits(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: str, words: str
) -> None:
    many = tmp_path / "many.yaml"
    many.write_text("defaults: {gflops: 10}\ndevices: {" + ", ".join(f"d{i}: {{}}" for i in range(13)) + "}\n")
    code, out, err = run(capsys, "simulate", "tiny-bert", "--devices-file", str(many), *arguments.split())
    assert (code, out) == (2, "")
    assert re.search(words, err), err
    assert "Traceback" not in err


@pytest.mark.parametrize("strategy", ["pipeline", "decoupled"])
def test_a_pinned_method_that_memory_forbids_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, strategy: str
) -> None:
    small = tmp_path / "small.yaml"
    small.write_text("defaults: {gflops: 10, memory_mib: 1}\ndevices: {a: {}, b: {}}\n")
    code, out, err = run(capsys, "simulate", "tiny-debert", "--devices-file", str(small), "--strategy", strategy)
    assert (code, out) == (4, "")
    assert re.search(rf"{strategy}/\S+ on .*: \w needs [\d.]+ MiB and has 1.0 MiB \([\d.]+ MiB missing\)", err), err


def test_the_strategy_auto_is_the_planners_choice(capsys: pytest.CaptureFixture[str]) -> None:
    common = ("simulate", "tiny-bert", "--devices-file", str(PAIR), "--json", "--variant", "kv")
    code, out, err = run(capsys, *common, "--strategy", "auto")
    assert code == 0, err
    assert out == run(capsys, *common)[1]


@pytest.mark.parametrize(
    ("config", "code", "words"),
    [
        ({"num_parts": 5}, 1, "num_parts 5 does not divide hidden_size 32; it can be 1, 2, 4, 8, 16, 32"),
        ({"num_groups": 3}, 1, "num_groups 3 must divide num_hidden_layers 4 and be less; it can be 1, 2"),
        ({"num_parts": 2}, 1, "config.json and the weights must be of the same model"),
    ],
)
def test_a_planner_ends_with_what_is_wrong_with_a_decoupled_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, config: dict[str, int], code: int, words: str
) -> None:
    made = tmp_path / "model"
    run(capsys, "model", "make", "tiny-debert", "--out", str(made))
    whole = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**whole, **config}))
    broker = ("--broker", "mqtt://127.0.0.1:1")  # nobody listens: nothing is asked of it before the model is read
    found, out, err = run(capsys, "planner", "--model", f"m={made}", *broker)
    assert (found, out) == (code, "")
    assert words in err


@pytest.mark.parametrize("models", [("tiny-debert", "tiny-bert"), ("tiny-bert", "tiny-debert")])
def test_a_planner_ends_with_whose_weights_a_checkpoint_has(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, models: tuple[str, str]
) -> None:
    for kind in models:
        run(capsys, "model", "make", kind, "--out", str(tmp_path / kind))
    weights, config = (tmp_path / kind for kind in models)
    (weights / "config.json").write_text((config / "config.json").read_text())
    code, out, err = run(capsys, "planner", "--model", f"m={weights}", "--broker", "mqtt://127.0.0.1:1")
    assert (code, out) == (1, "")
    assert re.search(r"the weights are those of another family than \w+: config.json's `architectures` must name", err)
    assert len(err) < 1500


# -- the process ------------------------------------------------------------------------------------------------------


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize("arguments", [["--help"], ["model", "make", "tiny-bert", "--out", "OUT"]])
def test_what_must_be_quick_imports_no_kernels(tmp_path: Path, arguments: list[str]) -> None:
    arguments = [str(tmp_path / "made") if a == "OUT" else a for a in arguments]
    code = (
        "import sys\nfrom hepti_mqtt.cli.main import main\n"
        f"try:\n    code = main({arguments!r})\nexcept SystemExit as end:\n    code = end.code\n"
        "print(sorted({'numba', 'paho', 'PIL', 'psutil'} & set(sys.modules)), file=sys.stderr)\nsys.exit(code)"
    )
    done = python(code)
    assert (done.returncode, done.stderr.strip()) == (0, "[]")


@pytest.mark.parametrize("arguments", [["--help"], ["bench", "--help"], ["lab", "--help"], ["agent", "--help"]])
def test_arguments_are_parsed_without_bench_and_lab(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom hepti_mqtt.cli.main import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit:\n    pass\n"
        "print([m for m in sys.modules if m.startswith(('hepti_mqtt.bench', 'hepti_mqtt.lab'))], file=sys.stderr)"
    )
    done = python(code)
    assert (done.returncode, done.stderr.strip()) == (0, "[]")


@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}, {"TERM": "xterm-256color", "COLUMNS": "40"}])
def test_no_escape_codes_and_no_broken_lines_without_a_terminal(environment: dict[str, str]) -> None:
    code = "import sys\nfrom hepti_mqtt.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    arguments = ["simulate", "tiny-bert", "--devices-file", str(PAIR), "-v"]
    done = python(code.replace("sys.argv[1:]", repr(arguments)), **environment)
    assert done.returncode == 0
    assert ESCAPE not in done.stdout + done.stderr
    assert any(line.startswith("why: ") and len(line) > 80 for line in done.stdout.splitlines())


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    arguments = ["simulate", "tiny-bert", "--devices-file", str(PAIR), "--explain"]
    code = f"import sys\nfrom hepti_mqtt.cli.main import main\nsys.exit(main({arguments!r}))"
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as out:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )
    assert "Traceback" not in done.stderr
    assert done.returncode == 1
