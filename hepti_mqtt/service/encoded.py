"""Files in JSON: base64, of either alphabet, or as a data URL."""

from __future__ import annotations

import base64
import binascii
import re
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from hepti_mqtt.core.errors import RequestError

_URL: Final = re.compile(rb"data:[^,]{0,200};base64,", re.IGNORECASE)
_URL_SAFE: Final = bytes.maketrans(b"-_", b"+/")


def read_base64(name: str, value: Any, what: str) -> bytes:
    """Return the bytes of a file in base64; raises RequestError. name, what: of the value and the file, for errors."""
    if not isinstance(value, str):
        raise RequestError(f"{name} must be a string of base64: the {what}'s file")
    try:
        data = value.encode("ascii")
        if (url := _URL.match(data)) is not None:
            data = unquote_to_bytes(data[url.end() :])
        data = data.translate(_URL_SAFE, b" \t\r\n").rstrip(b"=")
        return base64.b64decode(data + b"=" * (-len(data) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"{name} is not valid base64 ({error}); encode the {what}'s file with base64") from error
