"""Loads the native core and describes its structures; ``core.c`` says what each field means.

``load`` is called by every endpoint in shared memory, ``status`` by ``hoop doctor``. The environment variable
``HOOP_NATIVE=0`` turns the native core off in a process.
"""

from __future__ import annotations

import ctypes
import functools
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from hoop.native.build import HERE, LIBRARY, source_hash

DONE, AGAIN, FAILED, MISMATCH = range(4)
"""Return codes of the library's functions."""
FLAT, STAGED, DIRECT, ORDERED = range(4)
"""Algorithms."""
DTYPES = ("float16", "float32", "float64", "bfloat16", "int8", "int32", "int64", "uint8")
"""Element types, in the order of the library."""
OPERATORS = ("sum", "prod", "min", "max")
"""Operators, in the order of the library; ``avg`` is a sum with a division."""
BLOCK_BYTES = 4096
"""Size of a temporary block."""

_pointer, _u32, _u64, _i64 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int64


class EndpointState(ctypes.Structure):
    """``struct hoop_endpoint``: one rank's barriers with its peers."""

    rank: int
    size: int
    polls: int
    yields: int
    waiting: int
    failed: int
    barriers: int
    publications: int
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("rank", _u32),
        ("size", _u32),
        ("polls", _u32),
        ("yields", _u32),
        ("waiting", _u32),
        ("failed", _u32),
        ("barriers", _u64),
        ("publications", _u64),
        ("entered", _pointer),
        ("sleepers", _pointer),
        ("peer_left", _pointer),
        ("fingerprints", _pointer * 2),
    ]


class Step(ctypes.Structure):
    """``struct hoop_step``: one addition of an ordered sum."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [("left", _u32), ("right", _u32), ("result", _u32)]


class AllReduceState(ctypes.Structure):
    """``struct hoop_all_reduce``: one prepared all-reduce of one rank."""

    phase: int
    waited_ns: int
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("endpoint", _pointer),
        ("fingerprint", _u64),
        ("count", _u64),
        ("capacity", _u64),
        ("low", _u64),
        ("high", _u64),
        ("compares", _u32),
        ("algorithm", _u32),
        ("dtype", _u32),
        ("operator", _u32),
        ("itemsize", _u32),
        ("average", _u32),
        ("parts_count", _u32),
        ("steps_count", _u32),
        ("result", _u32),
        ("windows", _pointer * 2),
        ("parts", _pointer),
        ("targets", _pointer),
        ("steps", _pointer),
        ("temporaries", _pointer),
        ("source", _pointer),
        ("destination", _pointer),
        ("phase", _u32),
        ("publication", _u64),
        ("started_ns", _i64),
        ("waited_ns", _i64),
    ]


class NativeLibrary:
    """The functions of the loaded library. Each releases the interpreter lock while it runs."""

    def __init__(self, functions: ctypes.CDLL, identity: int) -> None:
        self.identity = identity
        """Ranks use the native core together only if all have this value."""
        self.instruction_set = _returning(functions.hoop_instruction_set, ctypes.c_char_p)().decode()
        self.barrier: Callable[..., int] = _taking(functions.hoop_barrier, _pointer, _u32, _u64, _i64)
        # No declared types: prepared arguments (``c_void_p``, ``c_uint64``) are the cheapest call that ctypes has.
        self.meet: Callable[[Any], int] = functions.hoop_meet
        self.meet_comparing: Callable[[Any, Any], int] = functions.hoop_meet_comparing
        self.all_reduce: Callable[[Any], int] = functions.hoop_all_reduce
        self.wake: Callable[..., None] = _taking(functions.hoop_wake, _pointer)
        self.resume: Callable[..., int] = _taking(functions.hoop_all_reduce_resume, _pointer, _i64)
        self.fold: Callable[..., None] = _taking(functions.hoop_fold, _pointer, _pointer, _pointer)
        self.normalise: Callable[..., None] = _taking(
            functions.hoop_normalise, _pointer, _pointer, _u64, _u64, _u64, _pointer, _pointer, _pointer
        )
        self.transpose: Callable[..., None] = _taking(functions.hoop_transpose, _pointer, _u64, _u64, _pointer)


def _taking(function: Any, *kinds: Any) -> Any:
    function.argtypes = kinds
    return function


def _returning(function: Any, kind: Any) -> Any:
    function.restype = kind
    return function


def addresses(values: list[int]) -> ctypes.Array[ctypes.c_void_p]:
    """An array of pointers."""
    return (ctypes.c_void_p * len(values))(*values)


def load() -> NativeLibrary | None:
    """The library; None if it is turned off, not built, out of date or not to be trusted (``status`` says why)."""
    return None if _turned_off() else _load()[0]


def status() -> str:
    """``in use (avx2)``, or why it is not in use and what to do."""
    if _turned_off():
        return "not in use: HOOP_NATIVE=0 turns it off; unset HOOP_NATIVE to use it"
    library, reason = _load()
    return f"in use ({library.instruction_set})" if library is not None else f"not in use: {reason}"


def _turned_off() -> bool:
    return os.environ.get("HOOP_NATIVE", "") == "0"


@functools.cache
def _load(folder: Path = HERE) -> tuple[NativeLibrary | None, str]:
    """The library, or None and the reason."""
    path = folder / LIBRARY
    try:
        if reason := _distrust(path):
            return None, reason
        functions = ctypes.CDLL(str(path))
        built, current = _returning(functions.hoop_source_hash, _u64)(), source_hash(folder)
    except FileNotFoundError:
        return None, "it is not built; python -m hoop.native.build builds it where a C compiler is there"
    except (OSError, AttributeError) as error:
        return None, f"it cannot be loaded: {error}"
    if built != current:
        return None, "it is built from other sources; python -m hoop.native.build builds it again"
    sizes = functions.hoop_endpoint_bytes(), functions.hoop_all_reduce_bytes()
    if sizes != (ctypes.sizeof(EndpointState), ctypes.sizeof(AllReduceState)):
        return None, f"its structures have other sizes, {sizes}, than hoop.native.library says"
    return NativeLibrary(functions, built), ""


def _distrust(path: Path) -> str:
    """Why the file must not be loaded: another user of the machine could have written it. Empty: it may be."""
    for one in (path, path.parent):
        if os.stat(one).st_mode & stat.S_IWOTH:
            return f"every user of this machine can write to {one}; chmod o-w {one}"
    return ""
