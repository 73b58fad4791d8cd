"""Settings and passwords, and the configuration of broker/."""

import re
from pathlib import Path

import pytest

from hepti_mqtt.core.errors import ConfigError
from hepti_mqtt.embedded_broker.broker import SETTINGS, closed_configuration, configuration, password_lines

BROKER = Path(__file__).parents[3] / "broker"


def lines(text):
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def test_the_file_and_the_embedded_broker_agree():
    text = (BROKER / "mosquitto.conf").read_text()
    assert text == closed_configuration("/etc/mosquitto")
    settings = [f"{s.name} {s.value}" for s in SETTINGS]
    assert lines(text)[-len(settings) :] == settings
    embedded = configuration("127.0.0.1", 1, user="me", stored_in="/s/", password_file=None, max_packet_bytes=None)
    assert lines(embedded)[-len(settings) :] == settings
    assert "persistence_location /s/" in lines(embedded)
    for setting in SETTINGS:
        assert f"# {setting.why[0].upper()}{setting.why[1:]}.\n{setting.name} {setting.value}\n" in text


def test_a_limit_replaces_the_packet_size():
    text = configuration("127.0.0.1", 1, user="me", stored_in="/s/", password_file="p", max_packet_bytes=1234)
    assert "max_packet_size 1234" in lines(text)
    assert "allow_anonymous false" in lines(text)
    assert "allow_anonymous true" not in text


@pytest.mark.parametrize("user", ["", "a:b", "a\nb"])
def test_a_user_name_that_would_break_the_file_is_refused(user):
    with pytest.raises(ConfigError):
        password_lines({user: "x"})


def test_passwords_are_salted_and_not_in_the_file():
    text = password_lines({"a": "s3cret", "b": "s3cret"})
    assert "s3cret" not in text
    first, second = text.splitlines()
    assert re.fullmatch(r"a:\$7\$20000\$[A-Za-z0-9+/=]{16}\$[A-Za-z0-9+/=]{88}", first)
    assert first.split("$")[3:] != second.split("$")[3:]
