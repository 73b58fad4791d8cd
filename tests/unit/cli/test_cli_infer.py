"""What `hepti infer` sends for its options."""

from __future__ import annotations

import pytest

from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.cli.infer import request_body
from hepti_mqtt.cli.main import build


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
