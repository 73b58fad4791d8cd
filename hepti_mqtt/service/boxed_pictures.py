"""Convert AVIF and HEIC to PPM in a separate process with memory and time limits of the kernel.

Headers of these formats are no limit: a file of 800 bytes may declare 16 x 16 pixels and contain a frame of
16384 x 16384, which the decoder allocates. `unboxed` starts this file as a program.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import resource
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from PIL import Image, ImageOps

_MEMORY_BYTES: Final = 384 << 20  # in addition to the interpreter
_CPU_S: Final = 20
_LENGTH: Final = struct.Struct(">I")
_HEIC: Final = "pi_heif"  # the library
_HEIC_BRANDS: Final = (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1")
_AVIF_BRANDS: Final = (b"avif", b"avis")
_ONE: Final = threading.Lock()  # process at a time


class UnreadablePicture(Exception):
    """A picture cannot be decoded; index: of the picture; too_large: it exceeds the pixel limit."""

    def __init__(self, index: int, why: str, too_large: bool = False) -> None:
        super().__init__(why)
        self.index, self.too_large = index, too_large


def is_boxed(file: bytes) -> bool:
    """Return whether a file is in a container of AVIF and HEIC (ISO base media)."""
    return file[4:8] == b"ftyp"


def _is_heic(file: bytes) -> bool:
    brands = file[8 : min(int.from_bytes(file[:4]), 256)]
    return any(brand in brands for brand in _HEIC_BRANDS) and not any(brand in brands for brand in _AVIF_BRANDS)


def unboxed(files: Sequence[bytes], most_pixels: int) -> list[bytes]:
    """Return the pictures as PPM, rotated by their EXIF orientation; raises UnreadablePicture.

    most_pixels: of all pictures together.
    """
    for i, file in enumerate(files):
        if _is_heic(file) and importlib.util.find_spec(_HEIC) is None:
            raise UnreadablePicture(i, "it is HEIC: send JPEG, or `pip install pi-heif` on the planner's machine")
    sent = b"".join(_LENGTH.pack(len(file)) + file for file in files)
    with _ONE:
        done = subprocess.run(
            [sys.executable, "-P", str(Path(__file__)), str(most_pixels)],
            input=sent,
            capture_output=True,
            env={**os.environ, "MALLOC_ARENA_MAX": "1"},  # each arena would count as 64 MiB
            check=False,
        )
    if done.returncode:
        raise _reason(done.stderr)
    return list(_parts(done.stdout))


def _reason(stderr: bytes) -> UnreadablePicture:
    """Return the error of the process; its output is empty if the kernel killed it."""
    with suppress(ValueError, TypeError):
        report = json.loads(stderr)
        return UnreadablePicture(int(report["index"]), str(report["why"]), bool(report["too_large"]))
    return UnreadablePicture(0, "decoding took too much memory or time")


def _parts(data: bytes) -> Any:
    at = 0
    while at < len(data):
        (size,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        yield data[at : at + size]
        at += size


def main() -> int:
    """Convert pictures from standard input to standard output; report the first invalid picture and stop."""
    left, formats = int(sys.argv[1]), ["AVIF"]
    with suppress(ImportError):
        import pi_heif

        pi_heif.options.DECODE_THREADS = 1
        pi_heif.register_heif_opener()
        formats.append("HEIF")
    with suppress(ImportError):
        from PIL import AvifImagePlugin

        AvifImagePlugin.DEFAULT_MAX_THREADS = 1
    files = list(_parts(sys.stdin.buffer.read()))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for i, file in enumerate(files):
        why, too_large = "", False
        try:
            with Image.open(io.BytesIO(file), formats=formats) as picture:
                left -= picture.width * picture.height
                if left < 0:
                    why, too_large = f"of {picture.width} x {picture.height} pixels", True
                else:
                    plain = io.BytesIO()
                    ImageOps.exif_transpose(picture).convert("RGB").save(plain, "PPM")
        except MemoryError:
            why = "decoding took too much memory"
        except Exception as error:  # decoders raise anything on hostile bytes
            why = type(error).__name__
        if why:
            json.dump({"index": i, "why": why, "too_large": too_large}, sys.stderr)
            return 1
        sys.stdout.buffer.write(_LENGTH.pack(plain.tell()) + plain.getvalue())
    return 0


if __name__ == "__main__":
    sys.exit(main())
