"""A site's own authority and its broker's certificate; `cryptography` makes the keys."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from hepti_mqtt.errors import ConfigError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

# The authority is the site's own, and nobody would think of renewing what has worked for years.
DAYS: Final = 3650
_MARGIN: Final = datetime.timedelta(days=1)  # boards without a battery wake up in the past


class KeyPair(NamedTuple):
    """A certificate and its private key, both PEM."""

    certificate: bytes
    key: bytes


def make_authority(name: str, now: datetime.datetime) -> KeyPair:
    """Return a new authority; raises ConfigError where `cryptography` is not installed."""
    _require()
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    key = _key()
    usage = _usage(key_cert_sign=True, crl_sign=True)
    own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    made = (
        _certificate(name, name, key.public_key(), now)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(own, critical=False)
        .sign(key, hashes.SHA256())
    )
    return _pair(made, key)


def make_certificate(authority: KeyPair, hosts: Sequence[str], now: datetime.datetime) -> KeyPair:
    """Return a broker's certificate for its names and addresses, signed by the authority; raises ConfigError."""
    _require()
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    issuer = x509.load_pem_x509_certificate(authority.certificate)
    signer = serialization.load_pem_private_key(authority.key, None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = _key()
    issued_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    made = (
        _certificate(hosts[0], issuer.subject, key.public_key(), now)
        .add_extension(x509.SubjectAlternativeName([_name(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(issued_by, critical=False)
        .sign(signer, hashes.SHA256())
    )
    return _pair(made, key)


def make_self_signed(name: str, now: datetime.datetime) -> KeyPair:
    """Return a self-signed certificate with its key; peers pin its fingerprint.

    Raises ConfigError where `cryptography` is not installed.
    """
    _require()
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    key = _key()
    made = (
        _certificate(name, name, key.public_key(), now)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return _pair(made, key)


def _require() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "keys and certificates are made by `cryptography`, which is not installed here; on the machine that makes "
            "the site, and only there: pip install cryptography"
        ) from error


def _key() -> ec.EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _name(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(*, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        encipher_only=False,
        decipher_only=False,
    )


def _certificate(
    subject: str, issuer: str | x509.Name, public: ec.EllipticCurvePublicKey, now: datetime.datetime
) -> x509.CertificateBuilder:
    from cryptography import x509

    def common(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text[:64])])

    return (
        x509.CertificateBuilder()
        .subject_name(common(subject))
        .issuer_name(common(issuer) if isinstance(issuer, str) else issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _MARGIN)
        .not_valid_after(now + datetime.timedelta(days=DAYS))
    )


def _pair(made: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> KeyPair:
    from cryptography.hazmat.primitives import serialization

    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return KeyPair(made.public_bytes(serialization.Encoding.PEM), private)
