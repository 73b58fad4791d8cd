"""The command line at a site of real processes: what it prints, and how it ends."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from site_processes import PATIENCE_S, SITE, Voice, ask_http, client_of, free_port, poll, site_of

from hepti_mqtt.core.errors import ConfigError
from hepti_mqtt.embedded_broker import start_broker
from hepti_mqtt.protocol.topics import Topics

METRICS_PORT = free_port()


KINDS = {"tiny": "tiny-bert", "vit": "tiny-vit-classifier", "masks": "tiny-bert-mlm"}
METRICS = ("--metrics", f"127.0.0.1:{METRICS_PORT}")
site = site_of(KINDS, {"a": "100MiB", "b": "100MiB"}, planner=METRICS)
hepti = client_of()


pytestmark = pytest.mark.usefixtures("hepti", "run_at_site")


def test_infer_has_every_field_that_is_promised(ask):
    result = ask("infer", "tiny", "--tokens", "24", "--repeat", "10", "--check")
    assert result["model"] == "tiny"
    assert {"id", "version", "strategy", "wire", "route", "devices"} <= set(result["plan"])
    assert sum(result["plan"]["devices"].values()) == pytest.approx(1.0)
    assert result["tokens"] == 24
    assert len(result["output"]["embedding"]) == 32
    latency = result["latency_ms"]
    assert len(latency["all"]) == 10
    assert min(latency["all"]) == latency["min"] <= latency["median"] <= latency["p95"] <= max(latency["all"])
    assert set(result["compute_ms"]) == set(result["wait_ms"]) == set(result["plan"]["devices"])
    assert result["bytes_on_wire"] == result["predicted_bytes"] > 0
    assert result["predicted_ms"] > 0
    assert 0 < result["max_abs_err"] < 2e-4


def test_infer_plan_only_computes_nothing(ask, run):
    pins = ("--strategy", "column", "--devices", "a,b")
    foretold = ask("infer", "tiny", "--tokens", "24", *pins, "--plan-only")
    assert (foretold["output"], foretold["compute_ms"], foretold["bytes_on_wire"]) == (None, {}, 0)
    result = ask("infer", "tiny", "--tokens", "24", *pins)
    assert result["plan"]["id"] == foretold["plan"]["id"]
    assert result["plan"]["predicted_ms"] == foretold["plan"]["predicted_ms"]
    assert result["bytes_on_wire"] == result["predicted_bytes"] == foretold["predicted_bytes"]
    code, out, err = run("infer", "tiny", "--tokens", "24", "--plan-only")
    assert (code, out) == (0, "")
    assert err
    assert run("infer", "tiny", "--tokens", "24", "--plan-only", "--check")[0] != 0


def test_infer_with_a_narrow_wire_and_narrow_weights(ask):
    pins = ("--strategy", "block", "--devices", "a,b")
    wide = ask("infer", "tiny", "--tokens", "20", *pins)
    narrow = ask("infer", "tiny", "--tokens", "20", *pins, "--wire", "f16", "--check")
    weights = ask("infer", "tiny", "--tokens", "20", *pins, "--weights", "w8a8", "--check")
    assert (narrow["plan"]["wire"], weights["plan"]["weights"]) == ("f16", "w8a8")
    assert 1e-6 < weights["max_abs_err"] < 0.2
    plans = wide["plan"], narrow["plan"]
    assert narrow["bytes_on_wire"] < wide["bytes_on_wire"], f"if one device has all of it nothing is exchanged: {plans}"
    assert 1e-5 < narrow["max_abs_err"] < 0.05


def test_infer_takes_what_requests_take(ask, run, tmp_path):
    hidden = ask("infer", "tiny", "--text", "hello world", "--want", "hidden")
    assert hidden["output"]["shape"] == [hidden["tokens"], 32]
    masks = ask("infer", "masks", "--text", "hello [MASK] world", "--top-k", "7")["output"]["masks"]
    assert len(masks[0]["tokens"]) == 7
    picture = tmp_path / "a.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 50, 3)).astype(np.uint8)).save(picture)
    one = ask("infer", "vit", "--image", str(picture), "--top-k", "2", "--check")
    assert (len(one["output"]["labels"]), one["max_abs_err"] < 2e-4) == (2, True)
    two = ask("infer", "vit", "--image", str(picture), "--image", str(picture))
    assert two["output"]["results"][0] == two["output"]["results"][1]
    assert ask("infer", "tiny", "--text", "word " * 99, "--truncate")["tokens"] == 40
    code, out, _ = run("infer", "tiny", *(a for i in range(9) for a in ("--text", f"text {i}")))
    assert code == 0
    assert len(json.loads(out)["results"]) == 9, "where no terminal is, all of it is printed"


def test_a_long_output_is_given_by_its_digest(ask):
    texts = [a for i in range(60) for a in ("--text", f"text {i}")]
    result = ask("infer", "tiny", *texts)
    assert "output" not in result
    assert len(bytes.fromhex(result["output_sha256"])) == 32


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["Tiny", "--tokens", "5"], 1),
        (["tiny", "--tokens", "99"], 1),
        (["tiny", "--ids", "5,x"], 2),
        (["vit", "--image", __file__], 1),
        (["tiny", "--image", "/nowhere/x.png"], 2),
        (["tiny", "--tokens", "5", "--devices", "a,nobody"], 4),
        (["tiny", "--tokens", "5", "--check", "--model-dir", "/nowhere"], 2),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_wrong_is_told_at_once(run, arguments, code):
    got, out, err = run("infer", *arguments, "--timeout", "90")
    assert (got, out) == (code, ""), err
    assert err
    _, out, _ = run("infer", *arguments, "--json")
    assert json.loads(out)["ok"] is False


def test_a_deadline_that_has_passed_ends_with_5(ask, site):
    for name in ("a", "b"):  # both go on living, and compute nothing
        site.running[name].send_signal(signal.SIGSTOP)
    try:
        result = ask("infer", "tiny", "--tokens", "5", "--deadline-ms", "200", code=5)
    finally:
        for name in ("a", "b"):
            site.running[name].send_signal(signal.SIGCONT)
    assert result["error"]["code"] == "deadline"
    assert ask("infer", "tiny", "--tokens", "5")["tokens"] == 5


def test_devices(ask, run):
    result = ask("devices", "--wait", "5")
    assert result["site"] == SITE
    assert {d["device"]: d["status"] for d in result["devices"]} == {"a": "online", "b": "online"}
    assert all(d["heartbeat"]["counters"] for d in result["devices"])
    code, out, _ = run("devices", "--wait", "5")
    assert code == 0
    lines = out.splitlines()
    assert lines[1].split()[:3] == ["device", "status", "threads"]
    assert [line.split()[:2] for line in lines[2:4]] == [["a", "online"], ["b", "online"]]


def test_plan(ask, run, tmp_path):
    own = ask("plan", "tiny")["active"]
    pinned = ask("infer", "tiny", "--tokens", "16", "--strategy", "megatron", "--devices", "a,b")["plan"]
    result = ask("plan", "tiny", "--svg", str(tmp_path / "x.svg"), "--layout-svg", str(tmp_path / "y.svg"))
    assert result["active"] == own, "what a request has pinned is its own"
    assert pinned["version"] in [plan["version"] for plan in result["pinned"]]
    assert result["work"] == {"factor": 1.0, "roles": {}}
    assert all("<svg" in (tmp_path / name).read_text("utf-8") for name in ("x.svg", "y.svg"))
    assert result["candidates"]
    assert "load" not in result
    load = ask("plan", "tiny", "--explain")["load"]
    assert (load["in_flight"], load["requests"]) == (2, 12)
    code, out, _ = run("plan", "tiny", "--explain", "--layer", "2")
    assert code == 0
    assert own["reason"] in out
    assert "layer 2:" in out
    code, out, _ = run("plan", "tiny", "--story")
    assert code == 0
    assert re.search(rf"{re.escape(pinned['id'])} +preparing +active", out)
    assert {"time", "plan", "from", "to", "cause"} == set(result["story"][-1])
    for arguments, expected in (((), 2), (("nothing",), 1)):
        code, _, err = run("plan", *arguments)
        assert code == expected
        assert "masks, tiny, vit" in err


@pytest.mark.parametrize(("command", "ends"), [("infer tiny --tokens 3", 3), ("devices --wait 0.1", 2)])
def test_a_site_without_a_planner_says_so(run, monkeypatch, command, ends):
    for module in ("infer", "show"):
        monkeypatch.setattr(f"hepti_mqtt.cli.{module}.PLANNER_S", 0.2)
    code, out, err = run(*command.split(), "--site", "empty")
    assert (code, out) == (ends, "")
    assert "empty" in err


def test_a_wrong_password_ends_with_6(run, site, tmp_path):
    model = f"tiny={site.models['tiny']}"
    commands = (
        ["devices"],
        ["infer", "tiny", "--tokens", "3"],
        ["planner", "--model", model],
        ["agent", "--id", "c", "--cache", str(tmp_path)],
    )
    with start_broker(users={"someone": "right"}) as broker:
        for login in ("someone:wrong@", ""):
            url = broker.url.replace("://", f"://{login}")
            for command in commands:
                code, out, err = run(*command, "--broker", url)
                assert (code, out) == (6, ""), err
                assert "wrong@" not in err
        code, _, _ = run("devices", "--broker", broker.url.replace("://", "://someone:right@"), "--wait", "0.1")
        assert code == ConfigError.exit_code, "let in, and nobody is there"


def test_ctrl_c_is_no_traceback(site):
    command = [sys.executable, "-m", "hepti_mqtt.cli", "infer", "tiny", "--tokens", "5", "--repeat", "1000000"]
    with (
        Voice(site.url, Topics(SITE).all_requests()) as listener,
        subprocess.Popen(
            command, env=site.environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as process,
    ):
        try:
            listener.next()
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "Traceback" not in err


def test_a_bare_text_of_an_automation(site, ask):
    topics, text = Topics(SITE), 'He said "hi"\nand left'
    answer = topics.text_response("tiny", "ha")
    with Voice(site.url, answer) as automation:
        automation.say(topics.text("tiny", "ha"), text.encode())
        answer_to_text = json.loads(automation.next(answer)[1])
    assert answer_to_text["result"]["embedding"] == pytest.approx(
        ask("infer", "tiny", "--text", text)["output"]["embedding"]
    )


def test_a_planner_can_be_read_by_prometheus(ask):
    ask("infer", "tiny", "--tokens", "8")

    wanted = {
        b'hepti_planner_request_seconds_count{model="tiny",outcome="ok"}',
        b'hepti_planner_devices{state="usable"} 2',
    }

    def counted():
        text = ask_http(METRICS_PORT, "/metrics")[1]
        return all(name in text for name in wanted)

    poll(counted, "the planner counts its answers and devices")
