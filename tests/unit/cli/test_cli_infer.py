"""What `hepti infer` sends for its options."""

from __future__ import annotations

import base64

import pytest

from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.cli.infer import request_body
from hepti_mqtt.cli.main import build
from hepti_mqtt.errors import ConfigError
from hepti_mqtt.service.sound import pcm_of


@pytest.mark.parametrize(
    ("options", "body"),
    [
        (["--text", "a"], {"text": "a"}),
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
