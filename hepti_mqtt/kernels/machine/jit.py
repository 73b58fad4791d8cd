"""The one place that compiles: flags, signatures, cache and warm-up of every kernel.

A kernel is a plain function that returns nothing, with one explicit signature. Arrays that it reads are declared
read-only and unaligned, which every C-contiguous array converts to: a view of a received frame never compiles a second
copy. With NUMBA_DISABLE_JIT=1 the same functions run as plain Python.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any, Final, Literal, NamedTuple, TypeVar

import llvmlite
import llvmlite.binding as llvm
import numba
import numba.extending
import numpy as np
from numba import types

from hepti_mqtt.kernels.machine import kept
from hepti_mqtt.kernels.machine.isa import DOT_OVERRIDE, OVERRIDE, dot, require_known, unit_is_forbidden

F = TypeVar("F", bound=Callable[..., Any])

# The package of kernels, with all the packages in it.
SOURCES: Final = Path(__file__).parents[1]
# Those that say when something is compiled: no code comes from them.
AROUND: Final = ("ahead.py", "trial.py", "machine/release.py", "machine/turns.py")

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
# What is asked before kernels are compiled or loaded: raises ConfigError for a wrong setting of the environment.
before_loading: Final[list[Callable[[], None]]] = [require_known]
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
    if llvm.get_host_cpu_name() == "generic" or unit_is_forbidden():
        # A CPU without a name may have dot products that the features in Numba's key do not tell of, and a system may
        # forbid what a CPU has.
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
    kept.mend(dispatcher._cache, sources_stamp())


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


def entry(function: Callable[..., None]) -> Callable[..., None]:
    """Return what an op calls for a kernel that is compiled, which may also be a plain function: the code itself.

    A dispatcher looks at the types of all arguments, in every call; where caches are cold that costs more than the call
    (5 of 11 µs). The code trusts its arguments as `entry_of` says: arrays of an op have the dtypes of its slots, which
    are checked when it is bound, and what comes from elsewhere is checked by the executor or by `Kernel.checked`.
    """
    arguments = _signatures.get(function)
    return function if arguments is None else entry_of(function, arguments)[0]


def helper(function: F) -> F:
    """Compile a function that kernels call, inlined into them."""
    return numba.njit(forceinline=True, **_options(FASTMATH))(function) if JIT else function


def exact(function: F) -> F:
    """Compile a helper whose operations keep the order in which they are written."""
    return numba.njit(forceinline=True, **_options(EXACT))(function) if JIT else function


def lowered(emit: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is LLVM IR in compiled code (`emit`, a Numba intrinsic) and `plain` in plain Python.

    Whole vectors are computed also where only some lanes are used: what the others overflow to is nobody's concern.
    """
    return numba.extending.intrinsic(emit) if JIT else np.errstate(all="ignore")(plain)


class Warm(NamedTuple):
    """Where the machine code of a process's kernels came from; both 0 where the JIT is disabled."""

    compiled: int
    from_cache: int


def check_settings() -> None:
    """Raise ConfigError if the environment asks for kernels that there are not."""
    for check in before_loading:
        check()


def compile_first() -> None:
    """Compile, or load from the cache, every kernel that f32 weights need and that is not compiled yet.

    It is called for every op that is bound, so it costs nothing where nothing is left to do. Raises ConfigError for a
    wrong setting of the environment.
    """
    if _compiled["first"] != len(registered):
        check_settings()
        with _compiling:
            _compile("first")


def compile_all(before: Callable[[], None] | None = None) -> None:
    """Compile, or load from the cache, every kernel that is not compiled yet; nothing compiles in a call after it.

    before: fills the cache; whoever needs these kernels meanwhile waits for it.
    """
    if _compiled["all"] != len(registered):
        check_settings()
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
    """Let go of what LLVM keeps of kernels that came from the cache so that others can be linked with them.

    For when all kernels are there: what is compiled later calls them by address.
    """
    for dispatcher, _ in registered:
        for made in dispatcher.overloads.values():
            # Not public in Numba: where a version lacks it, it stays, and a test says so.
            if getattr(made.library, "_shared_module", None) is not None:
                made.library._shared_module = None


def in_cache(dispatcher: Any, arguments: tuple[Any, ...]) -> bool:
    """Return whether the cache has a kernel's code, whole; also False where this version of Numba cannot tell."""
    return kept.has(dispatcher._cache, arguments, dispatcher.targetctx.codegen())


def cache_directory() -> Path | None:
    """Return where compiled code is kept, None where there is no cache."""
    place = getattr(registered[0][0], "_cache", None) if registered else None
    path = getattr(place, "cache_path", None)
    return None if path is None else Path(path)
