"""The command line without a broker: usage, models, simulations, and what its processes import."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.cli import infer
from hepti_mqtt.cli.infer import check, request_body
from hepti_mqtt.cli.main import COMMANDS, build, main
from hepti_mqtt.client.described import reference
from hepti_mqtt.config.sites import boards
from hepti_mqtt.core import errors
from hepti_mqtt.core.errors import ConfigError, HeptiError, NetworkError, WireError
from hepti_mqtt.models import spec_from_dict

ROOT = Path(__file__).resolve().parents[3]
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


@pytest.mark.parametrize("command", [*COMMANDS, "model make", "model inspect", "model verify"])
def test_every_command_explains_every_argument(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, out, err = run(capsys, *command.split(), "--help")
    assert (code, err) == (0, "")
    entries = re.findall(r"^  (\S.*(?:\n {4,}\S.*)*)", out[out.index("\n\n") :], re.MULTILINE)
    assert [e for e in entries if len(re.split(r"\s{2,}|\n", e)) < 2] == [], "an argument without a word about it"
    options = set(re.findall(r"--[a-z]+", out))
    assert ({"--broker", "--site"} <= options) == COMMANDS[command.split(maxsplit=1)[0]].at_a_site


@pytest.mark.parametrize(
    "arguments",
    [
        *("nosuch", "infer m", "infer m --tokens 0", "infer m --tokens 5 --text x", "infer m --tokens 5 --repeat -1"),
        *(
            "infer m --tokens 5 --timeout 0",
            "infer m --tokens 5 --wire f64",
            "infer m --tokens 5 --accuracy 2",
            "planner",
        ),
        *("planner --model nodirectory", "planner --model m=d --broker-mbit 0", "agent --id a --memory much"),
        *("agent --id a --threads 0", "agent --id No_Name! --broker mqtt://127.0.0.1:1"),
        "planner --model m=/nowhere --broker mqtt://127.0.0.1:1",
        *(
            f"{wrong} --broker mqtt://127.0.0.1:1"  # before the broker is asked
            for wrong in (
                "infer m --tokens 5 --label x",
                "infer m --image nosuch.png",
                "infer m --text x --context y",
                "bench m --methods rwo",
                "demo --port 1234",
            )
        ),
        *("model", "model make", "simulate bert-base", "broker --kind nosuch", "devices --site a/b", "devices"),
    ],
)
def test_usage_errors_end_with_2(capsys: pytest.CaptureFixture[str], arguments: str) -> None:
    code, out, err = run(capsys, *arguments.split())
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("infr m", "infer"),
        ("infer m --text x --reapet 3", "--repeat"),
        ("simulate bert-lage --devices-file paper-pair", "bert-large"),
        ("simulate bert-large --devices-file paper-pear", "paper-pair"),
        ("model make bert-bse --out x", "bert-base"),
    ],
)
def test_an_error_names_the_nearest_word_and_no_kind_for_tests(
    capsys: pytest.CaptureFixture[str], typed: str, meant: str
) -> None:
    code, _, err = run(capsys, *typed.split())
    assert code == 2
    assert len(err.splitlines()) == 1
    assert meant in err
    assert "tiny-" not in err


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys)
    assert (code, err) == (0, "")
    assert set(COMMANDS) <= set(re.findall(r"[\w-]+", out))


@pytest.mark.parametrize("command", ["devices", "plan", "infer m --tokens 3"])
def test_an_absent_broker_ends_with_3(capsys: pytest.CaptureFixture[str], free_tcp_port: int, command: str) -> None:
    code, out, err = run(capsys, *command.split(), "--broker", f"mqtt://127.0.0.1:{free_tcp_port}")
    assert (code, out) == (3, "")
    assert f"127.0.0.1:{free_tcp_port}" in err
    assert len(err.splitlines()) == 1, "one sentence, not broken into lines where no terminal is"
    code, out, _ = run(capsys, *command.split(), "--json")
    assert (code, json.loads(out)["error"]["code"]) == (2, "config")


@pytest.mark.parametrize(
    "before", ["--broker URL", "--json --broker URL", "--broker=URL -v", "--site home --broker URL"]
)
def test_common_options_may_stand_before_the_command(
    capsys: pytest.CaptureFixture[str], free_tcp_port: int, before: str
) -> None:
    url = f"mqtt://127.0.0.1:{free_tcp_port}"
    code, out, err = run(capsys, *before.replace("URL", url).split(), "devices")
    assert code == 3
    assert str(free_tcp_port) in (out if "--json" in before else err)
    assert run(capsys, "--nosuch", "devices")[0] == 2
    assert run(capsys, "--version")[1].startswith("hepti")


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("hepti inf", ["infer"]),
        ("hepti --json mod", ["model"]),
        ("hepti infer m --wire ", ["f32", "f16", "i8"]),
        ("hepti infer m --image doo", []),
    ],
)
def test_commands_options_and_values_are_completed(
    capsys: pytest.CaptureFixture[str], typed: str, offered: list[str]
) -> None:
    code, script, _ = run(capsys, "completion")
    assert code == 0
    words = " ".join(f"'{word}'" for word in typed.split(" "))
    shell_script = f"{script}\nCOMP_WORDS=({words}); COMP_CWORD={typed.count(' ')}; _hepti; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", shell_script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == offered


def test_broker_and_site_come_from_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, free_tcp_port: int
) -> None:
    monkeypatch.setenv("HEPTI_BROKER", f"mqtt://someone:secret@127.0.0.1:{free_tcp_port}")
    code, _, err = run(capsys, "devices")
    assert code == 3
    assert "secret" not in err
    monkeypatch.setenv("HEPTI_SITE", "not/a-name")
    code, _, err = run(capsys, "devices")
    assert code == 2
    assert "not/a-name" in err


def test_make_inspect_verify(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    directory = tmp_path / "model"
    code, out, _ = run(capsys, "model", "--json", "make", "tiny-bert", "--out", str(directory), "--seed", "4")
    summary = json.loads(out)
    assert (code, summary["kind"], summary["seed"], summary["directory"]) == (0, "tiny-bert", 4, str(directory))
    assert summary["bytes"] == sum(f.stat().st_size for f in directory.iterdir())
    code, out, _ = run(capsys, "model", "--json", "inspect", str(directory))
    result = json.loads(out)
    assert (code, result["architecture"], result["layers"], result["hidden"]) == (0, "BertModel", 3, 32)
    assert result["parameters"] * 4 <= summary["bytes"]
    code, out, _ = run(capsys, "model", "--json", "verify", str(directory))
    assert (code, json.loads(out)["max_abs_err"] < 2e-4) == (0, True)
    for action in ("inspect", "verify"):  # and for people
        code, out, _ = run(capsys, "model", action, str(directory))
        assert code == 0
        assert out
        assert run(capsys, "model", action, str(tmp_path))[:2] == (2, ""), "no model"
    assert run(capsys, "model", "make", "tiny-bert", "--out", str(directory))[0] == 2, "it is not empty"
    code, _, err = run(capsys, "model", "make", "bert-huge", "--out", str(tmp_path / "x"))
    assert code == 2
    assert "bert-large" in err


@pytest.mark.parametrize(
    "site",
    [p if p.stem == "mixed-four" else pytest.param(p, marks=pytest.mark.nightly) for p in SITES],
    ids=lambda path: path.stem,
)
def test_simulate_every_site(capsys: pytest.CaptureFixture[str], tmp_path: Path, site: Path) -> None:
    picture, layouts = tmp_path / "line.svg", tmp_path / "layouts.svg"
    common = ("simulate", "minilm", "--devices-file", str(site), "--tokens", "32")
    code, out, _ = run(capsys, *common, "--json", "--svg", str(picture), "--layout-svg", str(layouts))
    result = json.loads(out)
    assert code == 0
    best = result["candidates"][0]
    assert best["feasible"]
    assert result["chosen"]["predicted_s"] * 1e3 == pytest.approx(best["predicted_ms"])
    assert {c["strategy"] for c in result["candidates"]} >= {"single", "row/kv", "column", "block"}
    assert 0.99 < result["work"]["factor"] < 1.25  # some methods compute a little twice instead of sending it
    assert "<svg" in picture.read_text()
    assert "<svg" in layouts.read_text("utf-8")
    code, out, _ = run(capsys, *common, "--explain", "--layer", "1:3", "--strategy", "row", "--variant", "heads")
    assert code == 0
    assert all(f"layer {layer}:" in out for layer in (1, 2))
    assert "row/heads" in out
    assert "row/kv" not in out
    assert all(device in out for device in result["chosen"]["devices"])
    assert {"broker", "mesh", "f16", "i8"} <= set(re.findall(r"\w+", out))
    assert ESCAPE not in out


def test_simulate_an_onnx_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    net = small_net(tmp_path / "net.onnx")
    common = ("simulate", str(net), "--devices-file", str(PAIR), "--json")
    for arguments in ((), ("--accuracy", "0.1")):
        code, out, err = run(capsys, *common, *arguments)
        assert code == 0, out + err
        assert json.loads(out)["candidates"]


CATALOGUE = yaml.safe_load((ROOT / "configs" / "models.yaml").read_text())


@pytest.mark.parametrize(
    "model", [name if name == "qwen3-0.6b" else pytest.param(name, marks=pytest.mark.nightly) for name in CATALOGUE]
)
def test_a_known_model_is_simulated_before_its_download(capsys: pytest.CaptureFixture[str], model: str) -> None:
    common = ("simulate", model, "--devices-file", "two-n100-16gb", "--strategy", "single", "--json")
    steps = {}
    for weights in ("q8", "q4"):
        code, out, err = run(capsys, *common, "--weights", weights)
        assert code == 0, err
        steps[weights] = json.loads(out)["candidates"][0]["step_ms"]
    assert steps["q8"] > 1.3 * steps["q4"]


@pytest.mark.nightly  # a minute of processor for all
@pytest.mark.parametrize(
    ("model", "boards", "least_mib"),
    [("qwen3-30b-a3b", 4, 16_000), ("gpt-oss-20b", 4, 11_000), ("granite-3b-a800m", 1, 1_700)],
)
def test_what_mixtures_need_of_four_boards_and_of_one(
    capsys: pytest.CaptureFixture[str], model: str, boards: int, least_mib: int
) -> None:
    common = ("simulate", model, "--weights", "q4", "--devices-file", "four-pi5-8gb", "--json")
    code, out, err = run(capsys, *common)
    assert code == 0, err
    result = json.loads(out)
    name, best = next(iter(result["texts"].items()))
    alone = result["texts"]["single"]
    assert (len(result["chosen"]["devices"]), alone["feasible"]) == (boards, boards == 1)
    assert alone["needs_bytes"] >> 20 >= least_mib
    assert best["needs_bytes"] <= alone["needs_bytes"] / (boards - 0.8 if boards > 1 else 1)
    assert best["tokens_per_s"] >= alone["tokens_per_s"]
    assert 1e3 / best["tokens_per_s"] < best["first_token_ms"] < 60e3
    assert name in {candidate["strategy"] for candidate in result["candidates"]}


def test_a_model_without_weights_is_simulated(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CATALOGUE["qwen3-0.6b"]))
    common = ("--devices-file", "one-pi5-8gb", "--weights", "q4", "--json")
    by_name, by_file = (run(capsys, "simulate", name, *common) for name in ("qwen3-0.6b", str(tmp_path)))
    assert by_name == by_file
    assert by_name[0] == 0


def test_the_help_lists_all_boards(capsys: pytest.CaptureFixture[str]) -> None:
    shown = "".join(run(capsys, "simulate", "--help")[1].split())  # lines break at hyphens
    assert all(board in shown for board in boards())


def test_how_many_boards_a_model_needs(capsys: pytest.CaptureFixture[str]) -> None:
    common = ("simulate", "tiny-llama", "--board", "pi4-2gb", "--tokens", "64")
    code, out, _ = run(capsys, *common, "--tokens-per-s", "1", "--json")
    result = json.loads(out)
    assert (code, result["boards"]) == (0, 1)
    assert [row["boards"] for row in result["rows"]] == [1, 2, 3, 4, 6, 8]
    first = result["rows"][0]
    assert first["prompt_tokens_per_s"] > first["tokens_per_s"] > 0
    assert first["first_token_ms"] == pytest.approx(64e3 / first["prompt_tokens_per_s"])
    code, out, _ = run(capsys, *common, "--tokens-per-s", "1e12")
    assert (code, out.count("█") > 6, "not reached" in out) == (0, True, True)
    assert run(capsys, "simulate", "llama-3.1-8b", "--board", "pi-zero-2w")[0] == 4, "its weights do not fit"


@pytest.mark.parametrize(
    "arguments",
    [
        "bert-large --devices-file four-pi4 --tokens 100000",
        "vit-base --devices-file four-pi4 --tokens 20",
        "llama-3.2-1 --devices-file four-pi4",
        "bert-large",
        "bert-large --devices-file four-pi4 --board pi4-2gb",
        "bert-large --board pi9",
    ],
)
def test_a_simulation_of_nothing_is_refused(capsys: pytest.CaptureFixture[str], arguments: str) -> None:
    code, out, err = run(capsys, "simulate", *arguments.split())
    assert (code, out, len(err.splitlines())) == (2, "", 1)


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_no_escape_codes_and_no_broken_lines_without_a_terminal() -> None:
    code = "import sys\nfrom hepti_mqtt.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    arguments = ["simulate", "tiny-bert", "--devices-file", str(PAIR), "-v"]
    done = python(code.replace("sys.argv[1:]", repr(arguments)), TERM="xterm-256color", COLUMNS="40")
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


#: As cli.md and troubleshooting.md say, and the services' units, which give up at 2 and 6.
EXIT_CODES = {
    **dict.fromkeys(("HeptiError", "WireError", "RemoteError", "PacketLimitError", "WeightsChangedError"), 1),
    **dict.fromkeys(("RequestError", "ContextLengthError", "UnknownModelError", "OverloadedError"), 1),
    **dict.fromkeys(("IdInUseError", "CancelledRequestError"), 1),
    **dict.fromkeys(("ConfigError", "BadNameError", "ModelError", "UnsupportedModelError"), 2),
    **dict.fromkeys(("NetworkError", "CertificateDateError"), 3),
    "PlanError": 4,
    "DeadlineError": 5,
    "RefusedError": 6,
}


def test_every_error_has_an_exit_code_and_the_pages_name_it() -> None:
    classes = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, HeptiError)]
    assert {one.__name__ for one in classes} == set(EXIT_CODES)
    for page in ("docs/reference/cli.md", "docs/guide/troubleshooting.md"):
        sentence = re.search(r"Exit codes: (.*?)\.\s", (ROOT / page).read_text("utf-8"), re.DOTALL)
        assert sentence is not None
        named = {int(code) for code in re.findall(r"\b(\d) [a-z]", sentence[1])}
        assert named == {0, *EXIT_CODES.values()}, page


@pytest.mark.parametrize(("name", "code"), EXIT_CODES.items())
def test_an_error_ends_a_command_with_its_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, code: int
) -> None:
    error = getattr(errors, name)("why")

    def connect(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(infer.Hepti, "connect", connect)
    command = ("plan", "m", "--broker", "mqtt://nowhere")
    assert run(capsys, *command)[::2] == (code, "hepti: why\n")
    ended, out, _ = run(capsys, *command, "--json")
    assert (ended, json.loads(out)) == (code, {"ok": False, "error": {"code": error.code, "message": "why"}})


@pytest.mark.parametrize("absent", ["broker", "planner"])
@pytest.mark.parametrize(("patience", "ends"), [(["--timeout", "600"], WireError), ([], NetworkError)])
def test_a_user_who_names_a_time_waits_and_the_wait_counts(
    monkeypatch: pytest.MonkeyPatch, patience: list[str], ends: type[HeptiError], absent: str
) -> None:
    record = {"spec": {"family": "new"}}  # and so it ends
    limits: list[float] = []
    calls = Counter[str]()

    def answer(who: str, value: Any) -> Any:
        calls[who] += 1
        if who == absent and calls[who] < 4:
            raise NetworkError(f"no {who} answers")
        return value

    def wait_ready(_model: str, timeout: float, **_: Any) -> Any:
        limits.append(timeout)
        return answer("planner", record)

    client = SimpleNamespace(plan=lambda *_, **__: answer("planner", record), wait_ready=wait_ready)
    monkeypatch.setattr(infer.Hepti, "connect", lambda *_, **__: answer("broker", contextlib.nullcontext(client)))
    assert main(["infer", "m", "--text", "x", "--broker", "mqtt://nowhere", *patience]) == ends.exit_code
    assert not patience or limits[-1] < 600.0


def test_an_onnx_file_is_checked_with(tmp_path: Path) -> None:
    path = small_net(tmp_path / "net.onnx")
    args = build().parse_args(["infer", "net", "--tokens", "1", "--check"])
    with Checkpoint.open(path) as checkpoint:
        body = request_body(args, checkpoint.spec)
        hidden, spec = reference(checkpoint, body), spec_from_dict(checkpoint.spec.to_dict())
    hepti: Any = SimpleNamespace(infer=lambda *_, **_request: SimpleNamespace(hidden=hidden + np.float32(0.5)))
    assert check(hepti, args, body, str(path), spec) == pytest.approx(0.5)
    with pytest.raises(ConfigError):
        check(hepti, args, body, tmp_path / "none.onnx", spec)


def test_the_check_refuses_files_of_another_model(tmp_path: Path) -> None:
    """Of another width, of another family of the same width, or of one that reads something else."""
    paths = {name: make_model(f"tiny-{name}", tmp_path / name) for name in ("bert", "gpt2", "vit")}
    args = build().parse_args(["infer", "tiny", "--tokens", "5", "--check"])
    with Checkpoint.open(paths["bert"]) as checkpoint:
        body = request_body(args, checkpoint.spec)
        hidden, spec = reference(checkpoint, body), spec_from_dict(checkpoint.spec.to_dict())
    hepti: Any = SimpleNamespace(infer=lambda *_, **_request: SimpleNamespace(hidden=hidden))
    assert check(hepti, args, body, paths["bert"], spec) == 0
    for other in ("gpt2", "vit"):
        with pytest.raises(ConfigError):
            check(hepti, args, body, paths[other], spec)
    hepti = SimpleNamespace(infer=lambda *_, **_request: SimpleNamespace(hidden=np.zeros((5, 31), np.float32)))
    with pytest.raises(ConfigError):
        check(hepti, args, body, paths["bert"], spec)


NET = """<ir_version: 9, opset_import: ["" : 17]> net (float[1, 3, 9, 9] x) => (float[1, 5] y) {
    c = Conv(x, w)
    p = GlobalAveragePool(c)
    f = Flatten(p)
    y = Gemm <transB = 1> (f, v)
}"""


def small_net(path: Path) -> Path:
    """Write a classifier of small pictures; the test is skipped without the package onnx."""
    onnx = pytest.importorskip("onnx", reason="the extra `onnx` is not installed")
    model, rng = onnx.parser.parse_model(NET), np.random.default_rng(0)
    for name, shape in {"w": (4, 3, 3, 3), "v": (5, 4)}.items():
        weight = rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
    onnx.save(model, path)
    pictures = {"size": 9, "resample": 2, "image_mean": 0.5, "image_std": 0.5}
    (path.parent / "preprocessor_config.json").write_text(json.dumps(pictures))
    return path


def test_simulate_by_the_route_and_the_load_that_are_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    common = ("simulate", "tiny-bert", "--strategy", "row", "--json", "--devices-file")
    for route, routes in (("broker", {"broker"}), ("mesh", {"mesh"}), ("auto", {"mesh"})):
        code, out, _ = run(capsys, *common, str(PAIR), "--route", route)
        assert code == 0
        assert {c["route"] for c in json.loads(out)["candidates"]} == routes
    apart = tmp_path / "apart.yaml"
    apart.write_text("defaults: {gflops: 1}\ndevices: {a: {}, b: {mesh: false}}\n")
    assert json.loads(run(capsys, *common, str(apart))[1])["chosen"]["route"] == "broker"
    assert run(capsys, *common[:4], "--explain", "--devices-file", str(apart))[0] == 0
    common = ("simulate", "tiny-bert", "--devices-file", str(PAIR), "--strategy", "single")
    assert "requests/s" in run(capsys, *common, "--requests", "9", "--in-flight", "3")[1]
    assert "requests/s" not in run(capsys, *common)[1]
    load = json.loads(run(capsys, *common, "--requests", "9", "--json")[1])["candidates"][0]["load"]
    assert (load["requests"], load["in_flight"], load["requests_per_s"] > 0) == (9, 2, True)
    assert "load" not in json.loads(run(capsys, *common, "--json")[1])["candidates"][0]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        *((f"tiny-bert --strategy {pins}", 2) for pins in ("magic", "pipeline --variant kv", "row --variant ring")),
        *((f"tiny-bert --strategy {pins}", 2) for pins in ("two_d --variant 3x2", "decoupled", "fused_tiles")),
        *(
            (f"tiny-bert {more}", 2)
            for more in ("--variant nonsense", "--svg /nowhere/x.svg", "--layer a", "--layer 1:b")
        ),
        ("tiny-bert --layer 2:2", 2),
        ("tiny-bert --strategy pipeline --devices " + ",".join(f"d{i}" for i in range(13)), 2),
        ("bert-huge", 2),
        ("minilm", 4),
        ("minilm --explain", 4),
        ("tiny-debert --strategy pipeline", 4),
        ("tiny-debert --strategy decoupled", 4),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: str, code: int
) -> None:
    many, memory = tmp_path / "many.yaml", ", memory_mib: 1" if code == 4 else ""
    count = 13 if "d12" in arguments else 2 if code == 4 else 3  # what fits nowhere is looked for everywhere
    many.write_text(
        f"defaults: {{gflops: 10{memory}}}\ndevices: {{{', '.join(f'd{i}: {{}}' for i in range(count))}}}\n"
    )
    ended, out, err = run(capsys, "simulate", *arguments.split(), "--devices-file", str(many))
    assert ended == code
    assert bool(out) == ("--explain" in arguments)
    assert len(err.splitlines()) == 1 or code == 2
    assert "Traceback" not in err
    assert code == 2 or re.search(r"[\d.]+ MiB .* 1.0 MiB", err), "how much is missing"


def test_more_devices_than_a_map_has_places_say_who_has_nothing_to_do(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    nine = tmp_path / "nine.yaml"
    nine.write_text("defaults: {gflops: 10}\ndevices: {" + ", ".join(f"d{i}: {{}}" for i in range(9)) + "}\n")
    arguments = ["simulate", "tiny-vgg", "--devices-file", str(nine), "--devices", ",".join(f"d{i}" for i in range(9))]
    code, out, _ = run(capsys, *arguments, "--strategy", "fused_tiles", "--variant", "none", "--explain")
    assert code == 0
    assert "d4, d5, d6, d7, d8" in out
    code, out, _ = run(capsys, *arguments, "--strategy", "fused_tiles", "--variant", "none/leased", "--explain")
    assert code == 0
    assert "task 0" in out
