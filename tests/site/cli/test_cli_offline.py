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


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in ("HEPTI_BROKER", "HEPTI_SITE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("command", [*COMMANDS, "model make", "model inspect", "model verify"])
def test_every_command_explains_every_argument(run, command):
    code, out, err = run(*command.split(), "--help")
    assert (code, err) == (0, "")
    entries = re.findall(r"^  (\S.*(?:\n {4,}\S.*)*)", out[out.index("\n\n") :], re.MULTILINE)
    assert [e for e in entries if len(re.split(r"\s{2,}|\n", e)) < 2] == [], "an argument without a word about it"
    options = set(re.findall(r"--[a-z]+", out))
    assert ({"--broker", "--site"} <= options) == COMMANDS[command.split(maxsplit=1)[0]].at_a_site


WRONG = (
    *("nosuch", "infer m", "infer m --tokens 0", "infer m --tokens 5 --text x", "infer m --tokens 5 --repeat -1"),
    *("infer m --tokens 5 --timeout 0", "infer m --tokens 5 --wire f64", "infer m --tokens 5 --accuracy 2", "planner"),
    *("planner --model nodirectory", "planner --model m=d --broker-mbit 0", "agent --id a --memory much"),
    *("agent --id a --threads 0", "model", "model make", "broker --kind nosuch", "devices --site a/b", "devices"),
    *("simulate bert-base", "simulate bert-large --devices-file four-pi4 --tokens 100000", "simulate bert-large"),
    *("simulate vit-base --devices-file four-pi4 --tokens 20", "simulate llama-3.2-1 --devices-file four-pi4"),
    *("simulate bert-large --devices-file four-pi4 --board pi4-2gb", "simulate bert-large --board pi9"),
)
# What is refused before the broker is asked.
WRONG_AT_A_SITE = (
    *("infer m --tokens 5 --label x", "infer m --image nosuch.png", "infer m --text x --context y"),
    *("bench m --methods rwo", "demo --port 1234", "planner --model m=/nowhere", "agent --id No_Name!"),
)


@pytest.mark.parametrize("arguments", [*WRONG, *(f"{wrong} --broker mqtt://127.0.0.1:1" for wrong in WRONG_AT_A_SITE)])
def test_usage_errors_end_with_2(run, arguments):
    code, out, err = run(*arguments.split())
    assert (code, out, len(err.splitlines())) == (2, "", 1)


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
def test_an_error_names_the_nearest_word_and_no_kind_for_tests(run, typed, meant):
    code, _, err = run(*typed.split())
    assert code == 2
    assert len(err.splitlines()) == 1
    assert meant in err
    assert "tiny-" not in err


def test_no_command_prints_the_help(run):
    code, out, err = run()
    assert (code, err) == (0, "")
    assert set(COMMANDS) <= set(re.findall(r"[\w-]+", out))


@pytest.mark.parametrize("command", ["devices", "plan", "infer m --tokens 3"])
def test_an_absent_broker_ends_with_3(run, free_tcp_port, command):
    code, out, err = run(*command.split(), "--broker", f"mqtt://127.0.0.1:{free_tcp_port}")
    assert (code, out) == (3, "")
    assert f"127.0.0.1:{free_tcp_port}" in err
    assert len(err.splitlines()) == 1, "one sentence, not broken into lines where no terminal is"
    code, out, _ = run(*command.split(), "--json")
    assert (code, json.loads(out)["error"]["code"]) == (2, "config")


@pytest.mark.parametrize(
    "before", ["--broker URL", "--json --broker URL", "--broker=URL -v", "--site home --broker URL"]
)
def test_common_options_may_stand_before_the_command(run, free_tcp_port, before):
    url = f"mqtt://127.0.0.1:{free_tcp_port}"
    code, out, err = run(*before.replace("URL", url).split(), "devices")
    assert code == 3
    assert str(free_tcp_port) in (out if "--json" in before else err)
    assert run("--nosuch", "devices")[0] == 2
    assert run("--version")[1].startswith("hepti")


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
def test_commands_options_and_values_are_completed(run, typed, offered):
    code, script, _ = run("completion")
    assert code == 0
    words = " ".join(f"'{word}'" for word in typed.split(" "))
    shell_script = f"{script}\nCOMP_WORDS=({words}); COMP_CWORD={typed.count(' ')}; _hepti; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", shell_script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == offered


def test_broker_and_site_come_from_the_environment(run, monkeypatch, free_tcp_port):
    monkeypatch.setenv("HEPTI_BROKER", f"mqtt://someone:secret@127.0.0.1:{free_tcp_port}")
    code, _, err = run("devices")
    assert code == 3
    assert "secret" not in err
    monkeypatch.setenv("HEPTI_SITE", "not/a-name")
    code, _, err = run("devices")
    assert code == 2
    assert "not/a-name" in err


def test_make_inspect_verify(run, tmp_path):
    directory = tmp_path / "model"
    code, out, _ = run("model", "--json", "make", "tiny-bert", "--out", str(directory), "--seed", "4")
    summary = json.loads(out)
    assert (code, summary["kind"], summary["seed"], summary["directory"]) == (0, "tiny-bert", 4, str(directory))
    assert summary["bytes"] == sum(f.stat().st_size for f in directory.iterdir())
    code, out, _ = run("model", "--json", "inspect", str(directory))
    result = json.loads(out)
    assert (code, result["architecture"], result["layers"], result["hidden"]) == (0, "BertModel", 3, 32)
    assert result["parameters"] * 4 <= summary["bytes"]
    code, out, _ = run("model", "--json", "verify", str(directory))
    assert (code, json.loads(out)["max_abs_err"] < 2e-4) == (0, True)
    for action in ("inspect", "verify"):  # and for people
        code, out, _ = run("model", action, str(directory))
        assert code == 0
        assert out
        assert run("model", action, str(tmp_path))[:2] == (2, ""), "no model"
    assert run("model", "make", "tiny-bert", "--out", str(directory))[0] == 2, "it is not empty"
    code, _, err = run("model", "make", "bert-huge", "--out", str(tmp_path / "x"))
    assert code == 2
    assert "bert-large" in err


@pytest.mark.parametrize(
    "site",
    [p if p.stem == "mixed-four" else pytest.param(p, marks=pytest.mark.nightly) for p in SITES],
    ids=lambda path: path.stem,
)
def test_simulate_every_site(run, tmp_path, site):
    picture, layouts = tmp_path / "line.svg", tmp_path / "layouts.svg"
    common = ("simulate", "minilm", "--devices-file", str(site), "--tokens", "32")
    code, out, _ = run(*common, "--json", "--svg", str(picture), "--layout-svg", str(layouts))
    result = json.loads(out)
    assert code == 0
    best = result["candidates"][0]
    assert best["feasible"]
    assert result["chosen"]["predicted_s"] * 1e3 == pytest.approx(best["predicted_ms"])
    assert {c["strategy"] for c in result["candidates"]} >= {"single", "row/kv", "column", "block"}
    assert 0.99 < result["work"]["factor"] < 1.25  # some methods compute a little twice instead of sending it
    assert "<svg" in picture.read_text()
    assert "<svg" in layouts.read_text("utf-8")
    code, out, _ = run(*common, "--explain", "--layer", "1:3", "--strategy", "row", "--variant", "heads")
    assert code == 0
    assert all(f"layer {layer}:" in out for layer in (1, 2))
    assert "row/heads" in out
    assert "row/kv" not in out
    assert all(device in out for device in result["chosen"]["devices"])
    assert {"broker", "mesh", "f16", "i8"} <= set(re.findall(r"\w+", out))


def test_simulate_an_onnx_file(run, tmp_path):
    net = small_net(tmp_path / "net.onnx")
    common = ("simulate", str(net), "--devices-file", str(PAIR), "--json")
    for arguments in ((), ("--accuracy", "0.1")):
        code, out, err = run(*common, *arguments)
        assert code == 0, out + err
        assert json.loads(out)["candidates"]


CATALOGUE = yaml.safe_load((ROOT / "configs" / "models.yaml").read_text())


@pytest.mark.parametrize(
    "model", [name if name == "qwen3-0.6b" else pytest.param(name, marks=pytest.mark.nightly) for name in CATALOGUE]
)
def test_a_known_model_is_simulated_before_its_download(run, model):
    common = ("simulate", model, "--devices-file", "two-n100-16gb", "--strategy", "single", "--json")
    steps = {}
    for weights in ("q8", "q4"):
        code, out, err = run(*common, "--weights", weights)
        assert code == 0, err
        steps[weights] = json.loads(out)["candidates"][0]["step_ms"]
    assert steps["q8"] > 1.3 * steps["q4"]


@pytest.mark.nightly  # a minute of processor for all
@pytest.mark.parametrize(
    ("model", "boards", "least_mib"),
    [("qwen3-30b-a3b", 4, 16_000), ("gpt-oss-20b", 4, 11_000), ("granite-3b-a800m", 1, 1_700)],
)
def test_what_mixtures_need_of_four_boards_and_of_one(run, model, boards, least_mib):
    common = ("simulate", model, "--weights", "q4", "--devices-file", "four-pi5-8gb", "--json")
    code, out, err = run(*common)
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


def test_a_model_without_weights_is_simulated(run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CATALOGUE["qwen3-0.6b"]))
    common = ("--devices-file", "one-pi5-8gb", "--weights", "q4", "--json")
    by_name, by_file = (run("simulate", name, *common) for name in ("qwen3-0.6b", str(tmp_path)))
    assert by_name == by_file
    assert by_name[0] == 0


def test_the_help_lists_all_boards(run):
    shown = "".join(run("simulate", "--help")[1].split())  # lines break at hyphens
    assert all(board in shown for board in boards())


def test_how_many_boards_a_model_needs(run):
    common = ("simulate", "tiny-llama", "--board", "pi4-2gb", "--tokens", "64")
    code, out, _ = run(*common, "--tokens-per-s", "1", "--json")
    result = json.loads(out)
    assert (code, result["boards"]) == (0, 1)
    assert [row["boards"] for row in result["rows"]] == [1, 2, 3, 4, 6, 8]
    first = result["rows"][0]
    assert first["prompt_tokens_per_s"] > first["tokens_per_s"] > 0
    assert first["first_token_ms"] == pytest.approx(64e3 / first["prompt_tokens_per_s"])
    code, out, _ = run(*common, "--tokens-per-s", "1e12")
    assert (code, out.count("█") > 6, "not reached" in out) == (0, True, True)
    assert run("simulate", "llama-3.1-8b", "--board", "pi-zero-2w")[0] == 4, "its weights do not fit"


def hepti(*arguments, **how):
    """Run `hepti ARGUMENTS` as a process."""
    how = {"stdout": subprocess.PIPE, "env": {**os.environ, "PYTHONPATH": str(ROOT)}, **how}
    command = [sys.executable, "-m", "hepti_mqtt.cli", *arguments]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, timeout=60, **how)


def test_no_escape_codes_and_no_broken_lines_without_a_terminal():
    terminal = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "COLUMNS": "40"}
    done = hepti("simulate", "tiny-bert", "--devices-file", str(PAIR), "-v", env=terminal)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout + done.stderr
    assert any(line.startswith("why: ") and len(line) > 80 for line in done.stdout.splitlines())


def test_a_reader_that_goes_away_is_no_traceback():
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as out:
        done = hepti("simulate", "tiny-bert", "--devices-file", str(PAIR), "--explain", stdout=out)
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


def test_every_error_has_an_exit_code_and_the_pages_name_it():
    classes = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, HeptiError)]
    assert {one.__name__ for one in classes} == set(EXIT_CODES)
    for page in ("docs/reference/cli.md", "docs/guide/troubleshooting.md"):
        sentence = re.search(r"Exit codes: (.*?)\.\s", (ROOT / page).read_text("utf-8"), re.DOTALL)
        assert sentence is not None
        named = {int(code) for code in re.findall(r"\b(\d) [a-z]", sentence[1])}
        assert named == {0, *EXIT_CODES.values()}, page


@pytest.mark.parametrize(("name", "code"), EXIT_CODES.items())
def test_an_error_ends_a_command_with_its_code(monkeypatch, run, name, code):
    error = getattr(errors, name)("why")

    def connect(*_, **__):
        raise error

    monkeypatch.setattr(infer.Hepti, "connect", connect)
    command = ("plan", "m", "--broker", "mqtt://nowhere")
    assert run(*command)[::2] == (code, "hepti: why\n")
    ended, out, _ = run(*command, "--json")
    assert (ended, json.loads(out)) == (code, {"ok": False, "error": {"code": error.code, "message": "why"}})


@pytest.mark.parametrize("absent", ["broker", "planner"])
@pytest.mark.parametrize(("patience", "ends"), [(["--timeout", "600"], WireError), ([], NetworkError)])
def test_a_user_who_names_a_time_waits_and_the_wait_counts(monkeypatch, patience, ends, absent):
    record = {"spec": {"family": "new"}}  # and so it ends
    limits: list[float] = []
    calls = Counter[str]()

    def answer(who, value):
        calls[who] += 1
        if who == absent and calls[who] < 4:
            raise NetworkError(f"no {who} answers")
        return value

    def wait_ready(_model, timeout, **_):
        limits.append(timeout)
        return answer("planner", record)

    client = SimpleNamespace(plan=lambda *_, **__: answer("planner", record), wait_ready=wait_ready)
    monkeypatch.setattr(infer.Hepti, "connect", lambda *_, **__: answer("broker", contextlib.nullcontext(client)))
    assert main(["infer", "m", "--text", "x", "--broker", "mqtt://nowhere", *patience]) == ends.exit_code
    assert not patience or limits[-1] < 600.0


def checker(path, tokens):
    """Return hidden states of a model, and what `--check` says of hidden states and files."""
    args = build().parse_args(["infer", "m", "--tokens", str(tokens), "--check"])
    with Checkpoint.open(path) as checkpoint:
        body = request_body(args, checkpoint.spec)
        hidden, spec = reference(checkpoint, body), spec_from_dict(checkpoint.spec.to_dict())

    def checked(hidden, files):
        hepti = SimpleNamespace(infer=lambda *_, **__: SimpleNamespace(hidden=hidden))
        return check(hepti, args, body, files, spec)

    return hidden, checked


def test_an_onnx_file_is_checked_with(tmp_path):
    path = small_net(tmp_path / "net.onnx")
    hidden, checked = checker(path, 1)
    assert checked(hidden + np.float32(0.5), str(path)) == pytest.approx(0.5)
    with pytest.raises(ConfigError):
        checked(hidden, tmp_path / "none.onnx")


def test_the_check_refuses_files_of_another_model(tmp_path):
    """Of another width, of another family of the same width, or of one that reads something else."""
    paths = {name: make_model(f"tiny-{name}", tmp_path / name) for name in ("bert", "gpt2", "vit")}
    hidden, checked = checker(paths["bert"], 5)
    assert checked(hidden, paths["bert"]) == 0
    for states, name in ((hidden, "gpt2"), (hidden, "vit"), (np.zeros((5, 31), np.float32), "bert")):
        with pytest.raises(ConfigError):
            checked(states, paths[name])


NET = """<ir_version: 9, opset_import: ["" : 17]> net (float[1, 3, 9, 9] x) => (float[1, 5] y) {
    c = Conv(x, w)
    p = GlobalAveragePool(c)
    f = Flatten(p)
    y = Gemm <transB = 1> (f, v)
}"""


def small_net(path):
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


def test_simulate_by_the_route_and_the_load_that_are_asked_for(run, tmp_path):
    common = ("simulate", "tiny-bert", "--strategy", "row", "--json", "--devices-file")
    for route, routes in (("broker", {"broker"}), ("mesh", {"mesh"}), ("auto", {"mesh"})):
        code, out, _ = run(*common, str(PAIR), "--route", route)
        assert code == 0
        assert {c["route"] for c in json.loads(out)["candidates"]} == routes
    apart = tmp_path / "apart.yaml"
    apart.write_text("defaults: {gflops: 1}\ndevices: {a: {}, b: {mesh: false}}\n")
    assert json.loads(run(*common, str(apart))[1])["chosen"]["route"] == "broker"
    assert run(*common[:4], "--explain", "--devices-file", str(apart))[0] == 0
    common = ("simulate", "tiny-bert", "--devices-file", str(PAIR), "--strategy", "single")
    assert "requests/s" in run(*common, "--requests", "9", "--in-flight", "3")[1]
    assert "requests/s" not in run(*common)[1]
    load = json.loads(run(*common, "--requests", "9", "--json")[1])["candidates"][0]["load"]
    assert (load["requests"], load["in_flight"], load["requests_per_s"] > 0) == (9, 2, True)
    assert "load" not in json.loads(run(*common, "--json")[1])["candidates"][0]


def site_file(path, count, **defaults):
    """Write a site of some devices; return its path as text."""
    devices = {f"d{i}": {} for i in range(count)}
    path.write_text(yaml.safe_dump({"defaults": {"gflops": 10, **defaults}, "devices": devices}))
    return str(path)


PINS = ("magic", "pipeline --variant kv", "row --variant ring", "two_d --variant 3x2", "decoupled", "fused_tiles")


@pytest.mark.parametrize(
    "arguments",
    [
        *(f"tiny-bert --strategy {pins}" for pins in PINS),
        *(f"tiny-bert {wrong}" for wrong in ("--variant nonsense", "--svg /nowhere/x.svg", "--layer a", "--layer 1:b")),
        *("tiny-bert --layer 2:2", "bert-huge"),
        "tiny-bert --strategy pipeline --devices " + ",".join(f"d{i}" for i in range(13)),
    ],
)
def test_what_cannot_be_simulated_is_refused(run, tmp_path, arguments):
    count = 13 if "d12" in arguments else 3
    ended, out, _ = run("simulate", *arguments.split(), "--devices-file", site_file(tmp_path / "many.yaml", count))
    assert (ended, out) == (2, "")


@pytest.mark.parametrize(
    "arguments",
    ["minilm", "minilm --explain", "tiny-debert --strategy pipeline", "tiny-debert --strategy decoupled"],
)
def test_what_fits_nowhere_is_refused_with_the_memory_that_is_missing(run, tmp_path, arguments):
    site = site_file(tmp_path / "small.yaml", 2, memory_mib=1)
    ended, out, err = run("simulate", *arguments.split(), "--devices-file", site)
    assert (ended, bool(out), len(err.splitlines())) == (4, "--explain" in arguments, 1)
    assert re.search(r"[\d.]+ MiB .* 1.0 MiB", err)


def test_more_devices_than_a_map_has_places_say_who_has_nothing_to_do(run, tmp_path):
    nine = site_file(tmp_path / "nine.yaml", 9)
    arguments = ["simulate", "tiny-vgg", "--devices-file", nine, "--devices", ",".join(f"d{i}" for i in range(9))]
    code, out, _ = run(*arguments, "--strategy", "fused_tiles", "--variant", "none", "--explain")
    assert code == 0
    assert "d4, d5, d6, d7, d8" in out
    code, out, _ = run(*arguments, "--strategy", "fused_tiles", "--variant", "none/leased", "--explain")
    assert code == 0
    assert "task 0" in out
