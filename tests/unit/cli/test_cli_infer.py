"""What `hepti infer` sends for its options."""

import base64
import json

import numpy as np
import pytest

from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.cli import output
from hepti_mqtt.cli.infer import format_result, request_body
from hepti_mqtt.cli.main import build
from hepti_mqtt.core.errors import ConfigError
from hepti_mqtt.service.sound import pcm_of


@pytest.mark.parametrize(
    ("options", "body"),
    [
        (["--text", "a", "--text", "b", "--truncate"], {"texts": ["a", "b"], "truncate": True}),
        (["--text", "a", "--label", "x", "--label", "y"], {"text": "a", "candidate_labels": ["x", "y"]}),
        (["--text", "a", "--prompt", "query", "--dimensions", "8"], {"text": "a", "prompt": "query", "dimensions": 8}),
        (["--pair", "a", "b", "--pair", "c", "d"], {"pairs": [["a", "b"], ["c", "d"]]}),
        (["--query", "q", "--document", "a", "--document", "b"], {"query": "q", "documents": ["a", "b"]}),
        (["--question", "q", "--context", "c", "--truncate"], {"question": "q", "context": "c", "truncate": True}),
        (["--ids", "5,7", "--want", "hidden"], {"ids": [5, 7], "want": "hidden"}),
    ],
)
def test_options_become_the_keys_of_a_request(options, body):
    args = build().parse_args(["infer", "m", *options])
    assert request_body(args, spec_of_kind("tiny-bert")) == body


def test_a_recording_goes_with_what_is_said_of_it(tmp_path):
    (tmp_path / "a.wav").write_bytes(b"sound")
    options = ["--audio", str(tmp_path / "a.wav"), "--language", "de", "--translate", "--window", "30"]
    body = request_body(build().parse_args(["infer", "m", *options]), spec_of_kind("tiny-whisper"))
    assert body == {"audio": "c291bmQ=", "language": "de", "task": "translate", "window": 30.0}
    with pytest.raises(ConfigError):
        request_body(build().parse_args(["infer", "m", "--audio", "nothing.wav"]), spec_of_kind("tiny-whisper"))


def test_random_input_of_speech_is_a_recording():
    body = request_body(build().parse_args(["infer", "m", "--tokens", "20"]), spec_of_kind("tiny-whisper"))
    pcm = pcm_of("audio", base64.b64decode(body["audio"]))
    assert (len(pcm.data), pcm.rate) == (2 * 20 * 320, 16_000)


NUMBERS = np.arange(60, dtype="<f4").reshape(3, 20)
HIDDEN = {"dtype": "f32", "shape": [3, 20], "base64": base64.b64encode(NUMBERS.tobytes()).decode()}


@pytest.mark.parametrize(
    ("result", "lines"),
    [
        (
            {"embedding": [0.6, 0.8, *[0.0] * 382]},
            ["embedding: 0.6000, 0.8000, 0.0000, 0.0000, 0.0000, 0.0000, ... (384 numbers, norm 1.0000)"],
        ),
        ({"results": [{"embedding": [1.0] * 25}] * 2}, 2),
        ({"labels": [{"label": "cat", "score": 0.75}, {"label": "dog", "score": 0.25}]}, 2),
        ({"text": "Paris.", "reason": "stop"}, ["text: Paris.", "reason: stop"]),
        ({"text": "a" * 9000}, 1),
        (HIDDEN, 1),
    ],
)
def test_people_get_a_few_lines_and_pipes_all_of_a_result(result, lines):
    shown = format_result(result, terminal=True).splitlines()
    assert shown == lines if isinstance(lines, list) else len(shown) == lines
    assert all(len(line) < 120 for line in shown)
    assert json.loads(format_result(result, terminal=False)) == result


def test_a_prediction_for_devices_of_one_machine_holds_for_idle_cores():
    record = {"machines": {"a": "10.0.0.1", "b": "10.0.0.1"}}
    assert output.predicted(record, ["a", "b"], 12.34) == "12.3 on idle cores"
    assert output.predicted(record, ["a", "c"], 12.34) == output.predicted({}, ["a", "b"], 12.34) == "12.3"
