"""Giving back what only compiling and loading code needed, once all code is there.

What stays of a kernel that was loaded is its machine code. LLVM also keeps its bitcode, so that another kernel could be
linked with it, and its own code and tables are mapped from a file (some 70 MB): pages that were read once and that
nobody reads again. They come back from the file when somebody does.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from hepti_mqtt.kernels.machine import jit

_SMAPS: Final = Path("/proc/self/smaps")
_COMPILER: Final = "libllvmlite"
# Blocks of so many bytes have pages of their own, which go back as soon as a block is freed.
LARGE_BYTES: Final = 1 << 20
_M_MMAP_THRESHOLD: Final = -3  # of mallopt(3)
_PARTS_OF_A_MAPPING: Final = 6  # range, permissions, offset, device, inode, path


def release_compiler() -> None:
    """Give back the compiler's memory, as far as nobody needs it now; compiling is possible afterwards too."""
    if not jit.JIT:
        return
    if jit.all_ready():
        jit.forget_bitcode()
    return_memory()
    with suppress(OSError, AttributeError):  # neither Linux nor glibc: it stays
        advise = ctypes.CDLL(None, use_errno=True).madvise
        advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for start, stop in list(_clean_pages()):
            advise(start, stop - start, mmap.MADV_DONTNEED)


def return_large_blocks() -> None:
    """Have large blocks go back to the system when they are freed, where the C library is glibc.

    By itself it raises the limit to the size of what was freed, up to 32 MB: after the first weights that were given up
    later ones lie among small blocks, and leave holes that stay.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)


def return_memory() -> None:
    """Hand freed memory back to the system, where the C library is glibc."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _clean_pages() -> Iterator[tuple[int, int]]:
    """Give the address ranges of LLVM's library that are as in its file: read-only, and not one page changed before."""
    start, stop, of_file = 0, 0, False
    with _SMAPS.open() as lines:
        for line in lines:
            words = line.split()
            if not words[0].endswith(":"):
                start, stop = (int(address, 16) for address in words[0].split("-"))
                named = len(words) == _PARTS_OF_A_MAPPING and _COMPILER in words[-1]
                of_file = named and "w" not in words[1]
            elif of_file and words[:2] == ["Anonymous:", "0"]:
                yield start, stop
