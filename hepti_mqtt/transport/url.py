"""The broker's address and our login as one URL; its password is never printed."""

from __future__ import annotations

import hashlib
import hmac
import ssl
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, unquote, urlsplit

from hepti_mqtt.core.errors import ConfigError

DEFAULT_PORTS: Final = {"mqtt": 1883, "mqtts": 8883, "ws": 80, "wss": 443}
FORM: Final = "mqtt[s]://[user:password@]host[:port], or ws[s]://[user:password@]host[:port][/path]"
WEBSOCKET_PATH: Final = "/mqtt"  # the brokers' usual path
FILES: Final = frozenset({"ca", "cert", "key"})  # keys of the query
MAX_LOGIN_BYTES: Final = 1_000_000
_ITERATIONS: Final = 20_000
_CERTIFICATE: Final = "-----BEGIN CERTIFICATE-----"


@dataclass(frozen=True, slots=True)
class BrokerUrl:
    """A broker's address; `str()` and `repr()` omit the password."""

    host: str
    port: int
    tls: bool = False  #: mqtts or wss
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    ca: str = ""  #: file of the authority that signed the broker's certificate, "" for the system's authorities
    cert: str = ""  #: file of the client's certificate, "" without one
    key: str = ""  #: file of the client's key, "" if the certificate's file holds the key
    path: str = ""  #: path of the WebSocket, "" for MQTT over TCP

    @classmethod
    def parse(cls, text: str) -> BrokerUrl:
        """Parse `mqtt[s]://[user:password@]host[:port][?ca=FILE&cert=FILE&key=FILE]`, `ws[s]://...` or a login file.

        A login file's first line without "#" is such a URL; with TLS, the authority's certificate follows.
        User and password may be percent-encoded. Raises `ConfigError`, without the URL's text: it may hold a password.
        """
        return cls._of_url(text) if "://" in text else cls._of_file(text.strip())

    @classmethod
    def _of_file(cls, name: str) -> BrokerUrl:
        try:
            path = Path(name).expanduser()
            with path.open(encoding="utf-8") as file:
                content = file.read(MAX_LOGIN_BYTES)
        except (FileNotFoundError, IsADirectoryError, ValueError, RuntimeError):  # not a login file
            looks = f"there is no login file {name}: " if "@" not in name and name.isprintable() else ""
            raise ConfigError(f"{looks}the broker must be a URL, {FORM}, or a login file that is there") from None
        except OSError as error:
            raise ConfigError(f"the login file {name} cannot be read: {error.strerror or error}") from error
        lines = (line.strip() for line in content.splitlines())
        first = next((line for line in lines if line and not line.startswith("#")), "")
        if "://" not in first:
            raise ConfigError(f"{name} is no login file: its first line must be the broker's URL, {FORM}")
        try:
            url = cls._of_url(first)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
        # OpenSSL skips other lines, so the login file itself serves as the authority's file.
        return replace(url, ca=str(path)) if url.tls and not url.ca and _CERTIFICATE in content else url

    @classmethod
    def _of_url(cls, text: str) -> BrokerUrl:
        try:
            parts = urlsplit(text.strip())
            port = parts.port
            query = parse_qs(parts.query, strict_parsing=True) if parts.query else {}
        except ValueError:  # the error's text repeats parts of the URL
            raise ConfigError(
                f"the broker's URL cannot be read; write it as {FORM}, and percent-encode all characters of user and "
                "password except ASCII letters and digits (%2F for /, %23 for #, %3F for ?, %40 for @)"
            ) from None
        if parts.scheme not in DEFAULT_PORTS:
            raise ConfigError(f"the broker's URL has another scheme; write it as {FORM}")
        if not parts.hostname or port == 0 or any(letter.isspace() for letter in parts.hostname):
            raise ConfigError(f"the broker's URL names no host, or port 0; write it as {FORM}")
        is_websocket, tls = parts.scheme in ("ws", "wss"), parts.scheme in ("mqtts", "wss")
        if (parts.path not in ("", "/") and not is_websocket) or parts.fragment:
            raise ConfigError(f"the broker's URL has a path; write it as {FORM}, and the site with --site")
        if not all("!" <= letter <= "~" for letter in parts.path):
            raise ConfigError("the path of the broker's URL has letters that must be percent-encoded")
        if set(query) - (FILES if tls else set()):
            raise ConfigError(
                "the broker's URL has a query other than ?ca=FILE, cert=FILE or key=FILE, which belong to mqtts:// and wss://"
            )
        files = {name: query.get(name, [""])[-1] for name in FILES}
        if files["key"] and not files["cert"]:
            raise ConfigError("the broker's URL has key=FILE without the certificate: add cert=FILE")
        if parts.password and not parts.username:
            raise ConfigError(f"the broker's URL has a password but no user; write it as {FORM}")
        return cls(
            host=parts.hostname,
            port=port or DEFAULT_PORTS[parts.scheme],
            tls=tls,
            user=unquote(parts.username) if parts.username else None,
            password=unquote(parts.password) if parts.password is not None else None,
            **files,
            path=(parts.path or WEBSOCKET_PATH) if is_websocket else "",
        )

    @property
    def scheme(self) -> str:
        """Return mqtt, mqtts, ws or wss."""
        return ("ws" if self.path else "mqtt") + ("s" if self.tls else "")

    @property
    def address(self) -> str:
        """Return the URL without login and files, for announcements."""
        return f"{self.scheme}://{self.place}{'' if self.path == WEBSOCKET_PATH else self.path}"

    @property
    def place(self) -> str:
        """Return host:port, for messages."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def client_id(self, name: str) -> str:
        """Return the MQTT client id for `name`: constant, and secret if the user has a password.

        A broker disconnects a client if anybody else connects with its id, so strangers must not guess it.
        Mosquitto cannot bind ids to a user with several connections. Without a password the id is the name.
        """
        if self.password is None:
            return name
        return f"{name}-{hmac.digest(_id_key(self.user or '', self.password), name.encode(), 'sha256')[:8].hex()}"

    def ssl_context(self) -> ssl.SSLContext | None:
        """Return the TLS settings, None without TLS. Raises `ConfigError` for an unusable file."""
        if not self.tls:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # this protocol checks certificate and host name
        try:
            if self.ca:
                context.load_verify_locations(self.ca)
            else:
                context.load_default_certs()
        except (OSError, ValueError) as error:  # ValueError: a null character in the path
            raise ConfigError(f"the certificate authority's file {self.ca!r} cannot be used: {error}") from error
        if self.cert:
            try:
                # With an empty password OpenSSL refuses an encrypted key instead of prompting.
                context.load_cert_chain(self.cert, self.key or None, password="")
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"the client's certificate {self.cert!r} with key {self.key or self.cert!r} cannot be used: {error}"
                ) from error
        return context

    def __str__(self) -> str:
        scheme, _, place = self.address.partition("://")
        return f"{scheme}://{f'{self.user}@' if self.user else ''}{place}"


@lru_cache(maxsize=16)
def _id_key(user: str, password: str) -> bytes:
    # The broker's log shows ids; guessing passwords from them must be as slow as from its password file.
    return hashlib.pbkdf2_hmac("sha256", password.encode(), b"hepti client id of " + user.encode(), _ITERATIONS)
