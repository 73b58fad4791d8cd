"""The directory of a closed site and its certificates."""

import datetime
import ssl
import sys

import pytest

from hepti_mqtt.closed_site.certificates import DAYS, make_authority, make_certificate
from hepti_mqtt.closed_site.folder import SiteFolder
from hepti_mqtt.core.errors import BadNameError, ConfigError
from hepti_mqtt.transport.base import validity
from hepti_mqtt.transport.url import BrokerUrl

NOW = datetime.datetime.now(datetime.UTC)


@pytest.fixture
def site(tmp_path):
    return SiteFolder.create(tmp_path / "site", "home", ("192.168.1.10", "localhost"), 8883, NOW)


def users_in(site, name):
    lines = (site.broker / name).read_text().splitlines()
    if name == "passwd":
        return [line.partition(":")[0] for line in lines]
    return [line.removeprefix("user ") for line in lines if line.startswith("user ")]


def test_a_new_site_has_only_its_planner_whose_login_is_a_url(site):
    assert users_in(site, "passwd") == users_in(site, "acl") == ["planner"]
    url = BrokerUrl.parse(str(site.login("planner")))
    assert (url.host, url.port, url.tls, url.user) == ("192.168.1.10", 8883, True, "planner")
    assert url.ssl_context() is not None
    assert SiteFolder.open(site.path) == site


def test_only_the_owner_may_read_its_files_and_only_logins_contain_passwords(site):
    site.add("client", "alice")
    for place in (site.path, *site.path.rglob("*")):
        assert place.stat().st_mode & 0o077 == 0, place
    secret = BrokerUrl.parse(str(site.login("alice"))).password
    assert len(secret) >= 32
    assert [p for p in site.path.rglob("*") if p.is_file() and secret in p.read_text()] == [site.login("alice")]


def test_users_are_added_and_revoked(site):
    more = site.add("device", "pi-1").add("viewer", "hall")
    assert SiteFolder.open(site.path) == more
    assert users_in(more, "passwd") == users_in(more, "acl") == ["planner", "pi-1", "hall"]
    less = more.revoke("pi-1")
    assert SiteFolder.open(site.path) == less
    assert users_in(less, "passwd") == users_in(less, "acl") == ["planner", "hall"]
    assert not site.login("pi-1").exists()
    assert SiteFolder.open(site.path).add("client", "pi-1").users["pi-1"] == "client"
    before = site.login("planner").read_text()
    assert "planner" in users_in(less.revoke("planner"), "passwd")
    assert site.login("planner").read_text() != before, "with another password"


def test_copies_lists_every_file_to_copy(site):
    first = site.copies()
    assert {c.file for c in first} == {*site.broker.iterdir(), site.login("planner")}
    added = site.add("device", "pi-1").copies("pi-1")
    assert [c.file.name for c in added] == ["passwd", "acl", "pi-1.login"]
    assert added[-1].machine == "device pi-1"
    assert [c.file.name for c in SiteFolder.open(site.path).revoke("pi-1").copies("pi-1")] == ["passwd", "acl"]


@pytest.mark.parametrize("name", ["planner", "all", "Pi", "a/b", "a:b", ""])
def test_invalid_names_are_refused(site, name):
    with pytest.raises(BadNameError):
        site.add("device", name)


def test_mistakes_are_config_errors(site, tmp_path, monkeypatch):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "site.json").write_text('{"users": {"x": "king"}}')
    with_pi = site.add("device", "pi-1")
    for mistake in (
        lambda: with_pi.add("client", "pi-1"),
        lambda: site.revoke("pi-2"),
        lambda: SiteFolder.create(site.path, "home", ("localhost",), 8883, NOW),
        lambda: SiteFolder.open(tmp_path),
        lambda: SiteFolder.open(tmp_path / "bad"),
        lambda: SiteFolder.create(tmp_path / "other", "home", ("a/b",), 8883, NOW),
    ):
        with pytest.raises(ConfigError):
            mistake()
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigError):
        SiteFolder.create(tmp_path / "other", "home", ("localhost",), 8883, NOW)
    assert not (tmp_path / "other").exists()


@pytest.fixture(scope="module")
def authority():
    return make_authority("hepti site test", NOW)


def shake(authority, pair, host, tmp_path):
    """Shake hands in memory with a client that trusts only the authority; raises the client's error."""
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
def test_a_certificate_is_valid_for_every_name_and_address(authority, host, tmp_path):
    pair = make_certificate(authority, ("broker.home", "192.168.1.10", "::1", "localhost"), NOW)
    shake(authority, pair, host, tmp_path)


def test_it_is_invalid_for_other_names_and_authorities(authority, tmp_path):
    pair = make_certificate(authority, ("broker.home",), NOW)
    with pytest.raises(ssl.SSLCertVerificationError) as caught:
        shake(authority, pair, "other.home", tmp_path)
    assert caught.value.verify_code == 62  # OpenSSL's, for another host name
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(make_authority("hepti site test", NOW), pair, "broker.home", tmp_path)


@pytest.mark.parametrize("year", [2026, 2049, 2051])
def test_the_dates_of_a_certificate_are_read(authority, year):
    """From 2050 on times have four digits of the year."""
    pair = make_certificate(authority, ("broker.home",), datetime.datetime(year, 3, 1, 12, tzinfo=datetime.UTC))
    begin, end = validity(ssl.PEM_cert_to_DER_cert(pair.certificate.decode()))
    assert begin == datetime.datetime(year, 2, 28, 12, tzinfo=datetime.UTC)
    assert end - begin >= datetime.timedelta(days=DAYS)
