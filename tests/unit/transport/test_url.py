"""The broker's URL: parsing, login files, and hidden passwords."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hepti_mqtt.core.errors import ConfigError
from hepti_mqtt.transport.url import BrokerUrl


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("mqtt://broker", BrokerUrl("broker", 1883)),
        ("mqtts://broker", BrokerUrl("broker", 8883, tls=True)),
        (" mqtt://broker:99/ ", BrokerUrl("broker", 99)),
        ("mqtt://pi@broker", BrokerUrl("broker", 1883, user="pi")),
        ("mqtt://pi:a%3Ab%2F%40@broker", BrokerUrl("broker", 1883, user="pi", password="a:b/@")),
        ("mqtt://[fe80::1]:99", BrokerUrl("fe80::1", 99)),
        ("mqtts://broker?ca=%2Fca.pem", BrokerUrl("broker", 8883, tls=True, ca="/ca.pem")),
        ("ws://broker", BrokerUrl("broker", 80, path="/mqtt")),
        ("wss://pi@broker:99/a%20b?ca=/c", BrokerUrl("broker", 99, tls=True, user="pi", ca="/c", path="/a%20b")),
        ("mqtts://broker?cert=/c&key=/k", BrokerUrl("broker", 8883, tls=True, cert="/c", key="/k")),
    ],
)
def test_a_url_is_read(text, url):
    assert BrokerUrl.parse(text) == url


@pytest.mark.parametrize(
    "text",
    [
        *("", "broker", "broker:1883", "http://broker", "tcp://broker:1883", "mqtt://", "mqtt://:1883"),
        *(f"mqtt://{rest}" for rest in ("broker:0", "my broker", "broker:70000", "broker:port", "[::1", "broker/site")),
        *(f"mqtt://broker{end}" for end in ("#x", "?ca=x", "?cert=x")),
        *("ws://broker#x", "ws://broker/a b", "ws://broker?ca=x", "mqtts://broker?key=x", "mqtts://broker?ca"),
        *("mqtt://:s3cret@broker", "mqtt://u:s3cret@my broker", "mqtt://u:s3cret@broker/x", "mqtt://u:s3cret@broker:x"),
        *(f"mqtt://u:s3cret{end}@broker" for end in ("/more", "#more", "?more", "\u2100", "[")),
    ],
)
def test_a_wrong_url_is_a_config_error_without_any_part_of_the_password(text):
    with pytest.raises(ConfigError) as caught:
        BrokerUrl.parse(text)
    assert "s3cret" not in str(caught.value)


def test_a_url_is_printed_without_its_password():
    url = BrokerUrl.parse("mqtts://pi:s3cret@broker?ca=x")
    assert str(url) == "mqtts://pi@broker:8883"
    assert "s3cret" not in repr(url)
    assert str(BrokerUrl.parse("wss://pi:s3cret@broker/x?ca=y")) == "wss://pi@broker:443/x"
    assert BrokerUrl("::1", 1).place == "[::1]:1"


@given(st.text())
def test_any_text_is_a_url_or_a_config_error(text):
    for candidate in (text, f"mqtt://{text}"):
        try:
            BrokerUrl.parse(candidate)
        except ConfigError:
            continue


def test_a_login_file_holds_the_url_and_the_authority(tmp_path):
    login = tmp_path / "pi-1.login"
    login.write_text(
        "# of pi-1\n\nmqtts://pi-1:s3cret@broker\n-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n"
    )
    url = BrokerUrl("broker", 8883, tls=True, user="pi-1", password="s3cret", ca=str(login))
    assert BrokerUrl.parse(str(login)) == url
    login.write_text("mqtts://pi-1:s3cret@broker?ca=/ca.pem")
    assert BrokerUrl.parse(f" {login} ").ca == "/ca.pem"
    login.write_text("mqtt://pi-1:s3cret@broker")
    assert BrokerUrl.parse(str(login)) == BrokerUrl("broker", 1883, user="pi-1", password="s3cret")


@pytest.mark.parametrize("content", ["", "# nothing", "s3cret", "http://u:s3cret@h", "mqtt://u:s3cret@h/path"])
def test_a_wrong_login_file_is_named_without_what_is_in_it(tmp_path, content):
    login = tmp_path / "pi-1.login"
    login.write_text(content)
    for place in (login, "u:s3cret@broker"):
        with pytest.raises(ConfigError) as caught:
            BrokerUrl.parse(str(place))
        assert "s3cret" not in str(caught.value)
        assert place != login or "pi-1.login" in str(caught.value)


@pytest.mark.parametrize("ca", ["%00", "%2Fnowhere%2Fca.pem"])
def test_an_authority_that_cannot_be_read_is_a_config_error(ca):
    with pytest.raises(ConfigError):
        BrokerUrl.parse(f"mqtts://broker?ca={ca}").ssl_context()


def test_a_client_id_is_one_users_own_and_the_same_after_each_start():
    url = BrokerUrl("broker", 1883, user="pi-1", password="s3cret")
    own = url.client_id("hepti-home-pi-1-control")
    assert own.startswith("hepti-home-pi-1-control-")
    assert "s3cret" not in own
    assert replace(url, host="other").client_id("hepti-home-pi-1-control") == own
    others = [replace(url, password="x"), replace(url, user="pi-2"), replace(url, user=None)]
    assert own not in [other.client_id("hepti-home-pi-1-control") for other in others]
    assert own != url.client_id("hepti-home-pi-1-data")
    assert replace(url, password=None).client_id("name") == "name"
