"""The one place that compiles: flags, signatures, cache and warm-up of every kernel, and arrays by address.

A kernel is a plain function that returns nothing, with one explicit signature. Arrays that it reads are declared
read-only and unaligned, which every C-contiguous array converts to: a view of a received frame never compiles a
second
copy. With NUMBA_DISABLE_JIT=1 the same functions run as plain Python.

`release_compiler` returns memory once all code is loaded: LLVM keeps the bitcode of every kernel for linking, and
its own
code and tables (some 70 MB of a mapped file) are read once. They come back from the file when needed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from hashlib import sha256
from inspect import Parameter, Signature
from pathlib import Path
from threading import Lock
from typing import Any, Final, Literal, NamedTuple, TypeVar

import llvmlite
import llvmlite.binding as llvm
import numba
import numba.extending
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from hepti_mqtt.kernels.compile_cache import is_cached, make_robust
from hepti_mqtt.kernels.cpu import DOT_OVERRIDE, OVERRIDE, dot, require_known

F = TypeVar("F", bound=Callable[..., Any])

# The package of kernels, with all the packages in it.
SOURCES: Final = Path(__file__).parent
# Those that say when something is compiled: no code comes from them.
AROUND: Final = ("choice.py", "precompile.py")

JIT: Final = not getattr(numba.config, "DISABLE_JIT", False)

# Sums may be re-ordered (so that they vectorise) and multiplications fused; NaN and infinity keep their meaning, since
# "nnan" and "ninf" would break the -inf of an empty attention row. EXACT keeps the order of what is written: argument
# reductions such as (x + big) - big depend on it.
FASTMATH: Final = frozenset({"contract", "reassoc", "nsz"})
EXACT: Final = frozenset({"contract"})

INT: Final = types.int64
FLOAT: Final = types.float32
INT_ARRAY: Final = types.Array(types.int64, 1, "C")
TABLE: Final = types.Array(types.int64, 2, "C")

# Every kernel with its signature, in the order of definition.
registered: Final[list[tuple[Any, tuple[Any, ...]]]] = []
_signatures: Final[dict[Any, tuple[Any, ...]]] = {}
# Those that not every model needs, and that take long: what is needed at once is compiled before them.
later: Final[set[Any]] = set()
# Those that several threads divide: their signature, and how many of its last arguments say the part.
divided: Final[dict[Any, tuple[tuple[Any, ...], int]]] = {}
_compiled = {"first": 0, "all": 0}  # how many of `registered` were looked at
_compiling = Lock()


def reads(dtype: Any, ndim: int, layout: Literal["C", "A"] = "C") -> Any:
    """Return the Numba type of an array that a kernel only reads."""
    return types.Array(dtype, ndim, layout, readonly=True, aligned=False)


def fills(dtype: Any, ndim: int) -> Any:
    """Return the Numba type of an array that a kernel writes."""
    return types.Array(dtype, ndim, "C")


def _options(fastmath: frozenset[str]) -> dict[str, Any]:
    return {"nogil": True, "boundscheck": False, "error_model": "numpy", "fastmath": set(fastmath)}


@cache
def sources_stamp() -> str:
    """Return a digest of what compiled code depends on and Numba's key has not: llvmlite and all sources of kernels.

    By content, not by time: the same version installed again finds what it compiled before.
    """
    digest = sha256(llvmlite.__version__.encode())
    if llvm.get_host_cpu_name() == "generic":
        # A CPU without a name may have dot products that the features in Numba's key do not tell of.
        digest.update(dot().encode())
    for variable in (OVERRIDE, DOT_OVERRIDE):
        digest.update(os.environ.get(variable, "").encode() + b"\0")
    for path in sorted(set(SOURCES.rglob("*.py")) - {SOURCES / name for name in AROUND}):
        digest.update(path.relative_to(SOURCES).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _cached(dispatcher: Any) -> None:
    """Turn on the compile cache of a kernel, where a directory can be written.

    Numba's cache looks at the file of the function alone; a kernel also depends on the helpers and the tile that it
    inlines, so its stamp becomes that of the whole package. The CPU's name and features are in Numba's key: another CPU
    on the same directory compiles its own. A forced instruction set is not in it: no cache, unless NUMBA_CACHE_DIR is a
    directory called like the set, for it alone.
    """
    forced = os.environ.get(OVERRIDE) or os.environ.get(DOT_OVERRIDE)
    if forced and Path(os.environ.get("NUMBA_CACHE_DIR", "")).name != forced:
        return
    try:
        dispatcher.enable_caching()
    except RuntimeError:
        return  # neither the package nor the user's cache directory is writable: compile in every process
    make_robust(dispatcher._cache, sources_stamp())


def kernel(
    *arguments: Any, part: int = 0, narrow: bool = False, maps: bool = False, seldom: bool = False
) -> Callable[[F], F]:
    """Return a decorator that compiles a kernel for exactly these argument types.

    part: how many of the last arguments, all INT, say which part of the work is done; 0 if it is not divided. narrow,
    maps, seldom: it serves narrow weights, maps of images, or few plans alone, so only `compile_all` compiles it.
    """

    def decorate(function: F) -> F:
        if not JIT:
            return function
        dispatcher = numba.njit(**_options(FASTMATH))(function)
        _cached(dispatcher)
        registered.append((dispatcher, arguments))
        _signatures[dispatcher] = arguments
        if narrow or maps or seldom:
            later.add(dispatcher)
        if part:
            divided[dispatcher] = (arguments, part)
        return dispatcher  # type: ignore[no-any-return]

    return decorate


def template(function: Callable[..., Any]) -> Any:
    """Return what `entry_of` compiles for several argument types."""
    if not JIT:
        return function
    dispatcher = numba.njit(**_options(FASTMATH))(function)
    _cached(dispatcher)
    return dispatcher


def entry_of(dispatcher: Any, arguments: tuple[Any, ...]) -> tuple[Callable[..., Any], int]:
    """Return (what Python calls, the address of the code) of a kernel or template for exactly these argument types.

    The call trusts its arguments: nothing is looked up by their types, and an array of another dtype is read as if it
    had the right one.
    """
    if arguments not in dispatcher.overloads:
        dispatcher.compile(arguments)
    made = dispatcher.overloads[arguments]
    return made.entry_point, made.library.get_pointer_to_function(made.fndesc.llvm_func_name)


@cache
def entry(function: Callable[..., None]) -> Callable[..., None]:
    """Return what an op calls for a kernel that is compiled, which may also be a plain function: the code itself.

    A dispatcher looks at the types of all arguments, in every call; where caches are cold that costs more than the call
    (5 of 11 µs). The code trusts its arguments as `entry_of` says: arrays of an op have the dtypes of its slots, which
    are checked when it is bound, and what comes from elsewhere is checked by the executor or by `Kernel.checked`.
    """
    arguments = _signatures.get(function)
    return function if arguments is None else entry_of(function, arguments)[0]


def signature_of(function: Any) -> tuple[Any, ...] | None:
    """Return the types of a kernel's arguments; None of a plain function."""
    return _signatures.get(function)


def helper(function: F) -> F:
    """Compile a function that kernels call, inlined into them."""
    return numba.njit(forceinline=True, **_options(FASTMATH))(function) if JIT else function


def exact(function: F) -> F:
    """Compile a helper whose operations keep the order in which they are written."""
    return numba.njit(forceinline=True, **_options(EXACT))(function) if JIT else function


def lowered(emit: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is LLVM IR in compiled code (`emit`, a Numba intrinsic) and `plain` in plain Python.

    Whole vectors are computed also where only some lanes are used: overflow in the other lanes does not matter.
    """
    return numba.extending.intrinsic(emit) if JIT else np.errstate(all="ignore")(plain)


def emitter(count: int, codegen: Callable[..., Any], result: Any = types.void, kind: Any = INT) -> Callable[..., Any]:
    """Return the intrinsic of a function of `count` arguments of a kind that returns a `result`, for `lowered`."""

    def emit(_context: Any, *_arguments: Any) -> Any:
        return result(*[kind] * count), codegen

    # Numba reads the number of arguments from the signature, and takes no *args.
    names = ["context", *(f"argument_{i}" for i in range(count))]
    emit.__signature__ = Signature([Parameter(n, Parameter.POSITIONAL_OR_KEYWORD) for n in names])  # type: ignore[attr-defined]
    return emit


class Warm(NamedTuple):
    """Where the machine code of a process's kernels came from; both 0 where the JIT is disabled."""

    compiled: int
    from_cache: int


def compile_first() -> None:
    """Compile, or load from the cache, every kernel that f32 weights need and that is not compiled yet.

    It is called for every op that is bound, so it costs nothing where nothing is left to do. Raises ConfigError for a
    wrong setting of the environment.
    """
    if _compiled["first"] != len(registered):
        require_known()
        with _compiling:
            _compile("first")


def compile_all(before: Callable[[], None] | None = None) -> None:
    """Compile, or load from the cache, every kernel that is not compiled yet; nothing compiles in a call after it.

    before: fills the cache; other threads that need these kernels wait for it.
    """
    if _compiled["all"] != len(registered):
        require_known()
        with _compiling:
            if before is not None:
                before()
            _compile("all")


def _compile(which: Literal["first", "all"]) -> None:
    for dispatcher, arguments in registered[_compiled[which] :]:
        if (which == "all" or dispatcher not in later) and not dispatcher.signatures:
            dispatcher.compile(arguments)
            dispatcher.disable_compile()
        _compiled[which] += 1


def warm_up() -> Warm:
    """Compile every kernel, or load it from the cache, so that nothing compiles in a request; again does nothing."""
    compile_all()
    return warm()


def warm() -> Warm:
    """Return where the code of those kernels came from that are ready."""
    ready = [dispatcher for dispatcher, _ in registered if dispatcher.signatures]
    from_cache = sum(bool(dispatcher.stats.cache_hits) for dispatcher in ready)
    return Warm(len(ready) - from_cache, from_cache)


def all_ready() -> bool:
    """Return whether nothing is left to compile or to load."""
    return _compiled["all"] == len(registered)


def forget_bitcode() -> None:
    """Release the bitcode that LLVM keeps of cached kernels for linking others with them.

    For when all kernels are there: what is compiled later calls them by address.
    """
    for dispatcher, _ in registered:
        for made in dispatcher.overloads.values():
            # Not public in Numba: where a version lacks it, it stays, and a test says so.
            if getattr(made.library, "_shared_module", None) is not None:
                made.library._shared_module = None


def in_cache(dispatcher: Any, arguments: tuple[Any, ...]) -> bool:
    """Return whether the cache has a kernel's code, whole; also False where this version of Numba cannot tell."""
    return is_cached(dispatcher._cache, arguments, dispatcher.targetctx.codegen())


def cache_directory() -> Path | None:
    """Return where compiled code is kept, None where there is no cache."""
    place = getattr(registered[0][0], "_cache", None) if registered else None
    path = getattr(place, "cache_path", None)
    return None if path is None else Path(path)


_PREFETCH: Final = "llvm.prefetch.p0"
_READ, _WRITE = 0, 1
_FIRST_LEVEL: Final = (3, 1)  # locality, data


def _pointer_to(item: Any) -> Any:
    """Return what compiled code calls to turn an address into a pointer to items of a type."""

    def emit(_context: Any, _address: Any) -> Any:
        result: Any = types.CPointer(item)  # type: ignore[no-untyped-call]

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return result(types.intp), codegen

    return intrinsic(emit)


def _in_python(c_type: Any, dtype: Any) -> Callable[[Any], Any]:
    """Return a decorator for a helper that returns the array [count] at an address: without the JIT it is this one.

    Numba's own `carray` takes fifty microseconds for an array in plain Python, and kernels ask for thousands.
    """

    def at(address: int, count: int) -> Any:
        return np.ndarray((count,), dtype, (c_type * int(count)).from_address(int(address)))

    return lambda function: helper(function) if JIT else at


_floats_at: Final = _pointer_to(types.float32)
_octets_at: Final = _pointer_to(types.uint8)
_halves_at: Final = _pointer_to(types.uint16)


@_in_python(ctypes.c_float, np.float32)
def floats(address: int, count: int) -> Any:
    """Return the f32 array [count] at an address."""
    return carray(_floats_at(address), (count,), np.float32)


@_in_python(ctypes.c_uint8, np.uint8)
def octets(address: int, count: int) -> Any:
    """Return the u8 array [count] at an address."""
    return carray(_octets_at(address), (count,), np.uint8)


@_in_python(ctypes.c_uint16, np.uint16)
def halves(address: int, count: int) -> Any:
    """Return the bits of the f16 array [count] at an address, u16."""
    return carray(_halves_at(address), (count,), np.uint16)


def _fetch(purpose: int) -> Any:
    """Return the function that asks for the cache line at an address."""
    byte_pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)

    def codegen(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [byte_pointer, word, word, word])
        prefetch = builder.module.globals.get(_PREFETCH) or ir.Function(builder.module, kind, _PREFETCH)
        address = builder.inttoptr(arguments[0], byte_pointer)
        builder.call(prefetch, [address, *(ir.Constant(word, v) for v in (purpose, *_FIRST_LEVEL))])
        return context.get_dummy_value()

    return lowered(emitter(1, codegen), lambda _address: None)


# Ask for the cache line at an address, which need not be valid, so that a later read or store does not wait for it.
fetch_to_read: Final = _fetch(_READ)
fetch_to_write: Final = _fetch(_WRITE)

_SMAPS: Final = Path("/proc/self/smaps")
_COMPILER: Final = "libllvmlite"
_PARTS_OF_A_MAPPING: Final = 6  # range, permissions, offset, device, inode, path


def release_compiler() -> None:
    """Give back the compiler's memory, as far as it is not in use; compiling stays possible."""
    if not JIT:
        return
    if all_ready():
        forget_bitcode()
    return_memory()
    with suppress(OSError, AttributeError):  # neither Linux nor glibc: it stays
        advise = ctypes.CDLL(None, use_errno=True).madvise
        advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for start, stop in list(_clean_pages()):
            advise(start, stop - start, mmap.MADV_DONTNEED)


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
