"""The authority's certificates hold under the strictest check that Python has, for the names that they name."""

from __future__ import annotations

import datetime
import ssl

import pytest

from hepti_mqtt.closed_site.certificates import DAYS, make_authority, make_certificate

NOW = datetime.datetime.now(datetime.UTC)


@pytest.fixture(scope="module")
def authority():
    return make_authority("hepti site test", NOW)


def shake(authority, pair, host, tmp_path):
    """Shake hands in memory as a client that knows only the authority; raises what the client says."""
    (tmp_path / "crt").write_bytes(pair.certificate)
    (tmp_path / "key").write_bytes(pair.key)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(tmp_path / "crt", tmp_path / "key")
    asking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    asking.verify_flags |= ssl.VERIFY_X509_STRICT
    asking.load_verify_locations(cadata=authority.certificate.decode())
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client, server = asking.wrap_bio(down, up, server_hostname=host), serving.wrap_bio(up, down, server_side=True)
    for _ in range(6):
        done = 0
        for end in (client, server):
            try:
                end.do_handshake()
                done += 1
            except ssl.SSLWantReadError:
                continue
        if done == 2:
            return
    raise AssertionError("no handshake")


@pytest.mark.parametrize("host", ["broker.home", "192.168.1.10", "::1", "localhost"])
def test_a_certificate_holds_for_every_name_and_address(authority, host, tmp_path):
    pair = make_certificate(authority, ("broker.home", "192.168.1.10", "::1", "localhost"), NOW)
    shake(authority, pair, host, tmp_path)


def test_it_holds_for_nobody_else(authority, tmp_path):
    pair = make_certificate(authority, ("broker.home",), NOW)
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        shake(authority, pair, "other.home", tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(make_authority("hepti site test", NOW), pair, "broker.home", tmp_path)


def test_it_ends_after_ten_years(authority, tmp_path):
    long_ago = NOW - datetime.timedelta(days=DAYS + 1)
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        shake(authority, make_certificate(authority, ("broker.home",), long_ago), "broker.home", tmp_path)
