"""The table of options: what the client's type has, which values change nothing, and the refusals."""

from typing import get_type_hints

import pytest

from hepti_mqtt.client.body import RequestKeys
from hepti_mqtt.core.errors import RequestError
from hepti_mqtt.service.options import OPTIONS, checked
from hepti_mqtt.service.requests import REQUEST_KEYS


def test_the_client_has_the_options_of_the_table():
    transport = {"id", "reply_to"}  # the client's own
    assert get_type_hints(RequestKeys).keys() == REQUEST_KEYS - transport


@pytest.mark.parametrize(
    ("request_", "left"),
    [
        (dict.fromkeys(OPTIONS), []),
        ({"truncate": False, "stop": [], "logit_bias": {}, "tools": [], "tool_choice": "auto", "speculate": True}, []),
        ({"fit": True, "stop": ["x"], "temperature": 0, "text": None}, ["fit", "stop", "temperature", "text"]),
    ],
)
def test_a_value_that_changes_nothing_is_no_option(request_, left):
    assert sorted(checked(request_)) == left


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("truncate", 1), ("truncate", 0), ("top_k", -1), ("top_k", True), ("top_k", 1001), ("top_k", 2.0),
        ("temperature", 2.1), ("temperature", "1"), ("temperature", False), ("seed", -1), ("seed", 2**32),
        ("temperature", -1), ("temperature", float("nan")), ("top_p", 1.1), ("min_p", -0.1), ("repetition_penalty", 0),
        ("repetition_penalty", 11), ("presence_penalty", 3), ("seed", 0.5),
        ("logprobs", 21), ("max_new_tokens", 0), ("want", "all"), ("want", 1), ("thinking", "no"),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_refused_by_its_key(name, value):
    with pytest.raises(RequestError) as refused:
        checked({name: value})
    assert refused.value.param == name
    with pytest.raises(RequestError) as renamed:
        OPTIONS[name].check(value, "theirs")
    assert renamed.value.param == "theirs"
