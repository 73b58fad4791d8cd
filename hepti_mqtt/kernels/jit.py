"""The one place that compiles: flags, signatures, cache and warm-up of every kernel, and arrays by address.

A kernel is a plain function that returns nothing, with one explicit signature. Its input arrays are declared read-only
and unaligned, to which every C-contiguous array converts: a view of a received frame never compiles a second copy. With
NUMBA_DISABLE_JIT=1 the same functions run as plain Python.

`release_compiler` returns memory after all code is loaded: LLVM keeps the bitcode of every kernel for linking, and its
own code and tables (some 70 MB of a mapped file) are needed once. They can be read from the file again.
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

# The package of kernels.
SOURCES: Final = Path(__file__).parent
# Files without compiled code: they decide when code is compiled or on how many threads it runs.
AROUND: Final = ("choice.py", "precompile.py")

JIT: Final = not getattr(numba.config, "DISABLE_JIT", False)

# Sums may be re-ordered (so that they vectorise) and multiplications fused; NaN and infinity keep their meaning, since
# "nnan" and "ninf" would break the -inf of an empty attention row. EXACT keeps the written order: argument reductions
# such as (x + big) - big depend on it.
FASTMATH: Final = frozenset({"contract", "reassoc", "nsz"})
EXACT: Final = frozenset({"contract"})

INT: Final = types.int64
FLOAT: Final = types.float32
INT_ARRAY: Final = types.Array(types.int64, 1, "C")
TABLE: Final = types.Array(types.int64, 2, "C")

# Every kernel with its signature, in the order of definition.
registered: Final[list[tuple[Any, tuple[Any, ...]]]] = []
_signatures: Final[dict[Any, tuple[Any, ...]]] = {}
# Kernels that few models need and that take long to compile: `compile_first` leaves them out.
later: Final[set[Any]] = set()
# Kernels that several threads divide: their signature, and how many of its last arguments are the part.
divided: Final[dict[Any, tuple[tuple[Any, ...], int]]] = {}
_compiled = {"first": 0, "all": 0}  # number of `registered` that were handled
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
    """Return a digest of the dependencies of compiled code that Numba's key lacks: llvmlite and all kernel sources.

    By content, not by time: a reinstalled version finds its compiled code again.
    """
    digest = sha256(llvmlite.__version__.encode())
    if llvm.get_host_cpu_name() == "generic":
        # A CPU without a name may have dot products that are not among the features in Numba's key.
        digest.update(dot().encode())
    for variable in (OVERRIDE, DOT_OVERRIDE):
        digest.update(os.environ.get(variable, "").encode() + b"\0")
    for path in sorted(set(SOURCES.rglob("*.py")) - {SOURCES / name for name in AROUND}):
        digest.update(path.relative_to(SOURCES).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _cached(dispatcher: Any) -> None:
    """Enable the compile cache of a kernel if its directory can be written.

    Numba's cache depends on the function's file; a kernel also depends on the helpers and tiles that it inlines, so its
    stamp becomes that of the whole package. The CPU's name and features are in Numba's key: another CPU with the same
    directory compiles its own code. A forced instruction set is not in the key: no cache, unless NUMBA_CACHE_DIR is a
    directory with the set's name.
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

    part: number of last arguments, all INT, that are the part of the work; 0 if it is not divided. narrow, maps,
    seldom: it serves only narrow weights, maps of images, or few plans, so only `compile_all` compiles it.
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
    """Return a function that `entry_of` compiles for several argument types."""
    if not JIT:
        return function
    dispatcher = numba.njit(**_options(FASTMATH))(function)
    _cached(dispatcher)
    return dispatcher


def entry_of(dispatcher: Any, arguments: tuple[Any, ...]) -> tuple[Callable[..., Any], int]:
    """Return (Python's entry point, the address of the code) of a kernel or template for exactly these argument types.

    The call trusts its arguments: their types are not checked, and an array of another dtype is read as if it had the
    right one.
    """
    if arguments not in dispatcher.overloads:
        dispatcher.compile(arguments)
    compiled = dispatcher.overloads[arguments]
    return compiled.entry_point, compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)


@cache
def entry(function: Callable[..., None]) -> Callable[..., None]:
    """Return the entry point of a compiled kernel; a plain function is returned as it is.

    A dispatcher checks the types of all arguments in every call; with cold caches that costs more than the call (5 of
    11 µs). The code trusts its arguments, as in `entry_of`: an op's arrays have the dtypes of its slots, which are
    checked when it is bound.
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
    """Compile a helper with operations in the written order."""
    return numba.njit(forceinline=True, **_options(EXACT))(function) if JIT else function


def lowered(emit: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is LLVM IR in compiled code (`emit`, a Numba intrinsic) and `plain` in plain Python.

    Vectors are computed whole even if only some lanes are used: overflow in the other lanes does not matter.
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
    """The sources of the machine code of a process's kernels; both 0 if the JIT is disabled."""

    compiled: int
    from_cache: int


def compile_first() -> None:
    """Compile, or load from the cache, every kernel that f32 weights need and that is not ready.

    Called for every op that is bound, so it costs nothing if all are ready. Raises ConfigError for a wrong setting of
    the environment.
    """
    if _compiled["first"] != len(registered):
        require_known()
        with _compiling:
            _compile("first")


def compile_all(before: Callable[[], None] | None = None) -> None:
    """Compile, or load from the cache, every kernel that is not ready; no later call compiles.

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
    """Compile every kernel, or load it from the cache, so that no request compiles; repeated calls do nothing."""
    compile_all()
    return warm()


def warm() -> Warm:
    """Return the sources of the code of all ready kernels."""
    ready = [dispatcher for dispatcher, _ in registered if dispatcher.signatures]
    from_cache = sum(bool(dispatcher.stats.cache_hits) for dispatcher in ready)
    return Warm(len(ready) - from_cache, from_cache)


def all_ready() -> bool:
    """Return whether every kernel is ready."""
    return _compiled["all"] == len(registered)


def forget_bitcode() -> None:
    """Release the bitcode of cached kernels, which LLVM keeps for linking.

    Only after all kernels are ready: code that is compiled later calls them by address.
    """
    for dispatcher, _ in registered:
        for compiled in dispatcher.overloads.values():
            # Not public in Numba: if a version lacks it, the bitcode stays, and a test fails.
            if getattr(compiled.library, "_shared_module", None) is not None:
                compiled.library._shared_module = None


def in_cache(dispatcher: Any, arguments: tuple[Any, ...]) -> bool:
    """Return whether the cache has a kernel's complete code; also False if this version of Numba cannot tell."""
    return is_cached(dispatcher._cache, arguments, dispatcher.targetctx.codegen())


def cache_directory() -> Path | None:
    """Return the directory of compiled code, None without a cache."""
    place = getattr(registered[0][0], "_cache", None) if registered else None
    path = getattr(place, "cache_path", None)
    return None if path is None else Path(path)


_PREFETCH: Final = "llvm.prefetch.p0"
_READ, _WRITE = 0, 1
_FIRST_LEVEL: Final = (3, 1)  # locality, data


def _pointer_to(item: Any) -> Any:
    """Return the intrinsic that turns an address into a pointer to items of a type."""

    def emit(_context: Any, _address: Any) -> Any:
        result: Any = types.CPointer(item)  # type: ignore[no-untyped-call]

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return result(types.intp), codegen

    return intrinsic(emit)


def _in_python(c_type: Any, dtype: Any) -> Callable[[Any], Any]:
    """Return a decorator that, if the JIT is disabled, replaces a helper by one in Python: the array at an address.

    Numba's own `carray` takes fifty microseconds for an array in plain Python, and kernels need thousands.
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
    """Return the function that prefetches the cache line at an address."""
    byte_pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)

    def codegen(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [byte_pointer, word, word, word])
        prefetch = builder.module.globals.get(_PREFETCH) or ir.Function(builder.module, kind, _PREFETCH)
        address = builder.inttoptr(arguments[0], byte_pointer)
        builder.call(prefetch, [address, *(ir.Constant(word, v) for v in (purpose, *_FIRST_LEVEL))])
        return context.get_dummy_value()

    return lowered(emitter(1, codegen), lambda _address: None)


# Prefetch the cache line at an address, valid or not, so that a later read or store does not wait for it.
fetch_to_read: Final = _fetch(_READ)
fetch_to_write: Final = _fetch(_WRITE)

_SMAPS: Final = Path("/proc/self/smaps")
_COMPILER: Final = "libllvmlite"
_PARTS_OF_A_MAPPING: Final = 6  # range, permissions, offset, device, inode, path


def release_compiler() -> None:
    """Return the compiler's unused memory to the system; compiling stays possible."""
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
    """Return freed memory to the system, if the C library is glibc."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _clean_pages() -> Iterator[tuple[int, int]]:
    """Yield the address ranges of LLVM's library that equal its file: read-only, without a changed page."""
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
