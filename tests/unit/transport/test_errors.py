"""Errors of failed connections."""

from __future__ import annotations

import ssl

import pytest

from hepti_mqtt.core.errors import CertificateDateError
from hepti_mqtt.transport import base as transport
from hepti_mqtt.transport.url import BrokerUrl

URL = BrokerUrl.parse("mqtts://broker.home")


def certificate_error(code):
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_code, error.verify_message = code, "OpenSSL's message"
    return error


@pytest.mark.parametrize("code", [9, 10])
def test_a_certificate_of_another_time_names_both_clocks(monkeypatch, code):
    monkeypatch.setattr(ssl, "get_server_certificate", lambda *_, **__: "PEM")
    monkeypatch.setattr(ssl, "PEM_cert_to_DER_cert", lambda _: b"..\x30\x1e\x17\x0d991201103000Z\x17\x0d491203103000Z")
    error = transport.absent(URL, certificate_error(code))
    assert isinstance(error, CertificateDateError)
    assert all(date in str(error) for date in ("1999-12-01 10:30", "2049-12-03 10:30", "clock says 20"))


@pytest.mark.parametrize("error", [ConnectionResetError(), ssl.SSLError(1, "wrong version number"), ssl.SSLEOFError()])
def test_a_port_without_tls_is_named(error):
    assert "mqtt://" in str(transport.absent(URL, error))
    assert "mqtt://" not in str(transport.absent(URL, ConnectionRefusedError()))
