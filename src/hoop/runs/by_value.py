"""A job's objects as bytes, for the processes that train it: a process of this machine, or the actors of Ray.

    encode(job) ──▶ Encoded: a pickle, and buffers: the elements of tensors and arrays, which are not copied
    this machine    write_shared: one file in memory ── its descriptor ──▶ read_shared: mapped copy-on-write
    Ray             the object store, which shares the buffers between the actors of a node

Code that no import finds there (a script, a notebook, a lambda) travels by value, by ``cloudpickle``; modules are
imported by their names. The bytes go from a process to those that it has started and to nothing else: decoding executes
code, so nothing decodes what came over Hoop's own connections.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import mmap
import os
import pickle
import struct
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from inspect import isfunction, ismethod
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize

from hoop.engine.job import Job
from hoop.errors import InvalidArgument, ResourceExhausted

ALIGN_BYTES = 64
MAPPED_BYTES = 1 << 20
"""Size from which on a buffer may be a file that is mapped again."""
PROTOCOL = 5
_INSTALLED = (
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    *{sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")},
)
"""Where modules are that every process finds: Hoop, and what is installed."""
_MAX_DEPTH = 12
_PHRASES = {
    "lock": "a lock",
    "RLock": "a lock",
    "TextIOWrapper": "an open file",
    "BufferedReader": "an open file",
    "BufferedWriter": "an open file",
    "generator": "a generator",
    "Thread": "a thread",
    "socket": "a socket",
    "Connection": "a connection",
    "mmap": "a mapped file",
}


@dataclass(frozen=True)
class Encoded:
    """An object as bytes: a pickle, and the buffers that it refers to."""

    data: Any
    """The pickle."""
    buffers: list[Any] = field(default_factory=list)

    def __reduce__(self) -> tuple[Any, ...]:
        """Gives the bytes to the outer pickle as buffers: they stay beside it and are not copied into it."""
        return Encoded, (pickle.PickleBuffer(self.data), [pickle.PickleBuffer(buffer) for buffer in self.buffers])


# ---- encoding


def encode(value: Any) -> Encoded:
    """Encodes an object. Its buffers refer to its memory. Raises InvalidArgument, with the path to what cannot go."""
    with _modules_by_value():
        try:
            return _encode(value)
        except Exception as error:
            path, culprit = _find_culprit(value, error)
            what = _PHRASES.get(type(culprit).__name__, f"an object of {_type_name(culprit)}")
            raise InvalidArgument(
                f"{path or type(value).__name__}: {what} cannot be sent to the devices, which are processes of their "
                f"own ({_one_line(error)}); make it where it is used first, on the device, or leave it out of what is "
                "sent by __getstate__"
            ) from error


def _encode(value: Any) -> Encoded:
    out = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    _Pickler(out, buffers.append).dump(value)
    return Encoded(out.getbuffer(), [buffer.raw() for buffer in buffers])


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """``cloudpickle``'s, which leaves the elements of tensors in their memory. Tensors go on to share memory."""

    def __init__(self, out: io.BytesIO, buffer_callback: Callable[[pickle.PickleBuffer], Any]) -> None:
        super().__init__(out, protocol=PROTOCOL, buffer_callback=buffer_callback)
        self._storages: dict[int, torch.UntypedStorage] = {}
        """One Python object of each storage, by its address in PyTorch: each tensor makes another object of it."""

    def reducer_override(self, value: Any) -> Any:
        """Called by ``pickle`` for every object that has no form of its own there."""
        if isinstance(value, torch.storage.TypedStorage):
            return _typed_storage, (self._shared(value._untyped_storage), value.dtype)
        if isinstance(value, torch.UntypedStorage):
            return _storage, (pickle.PickleBuffer(_bytes_of(value)),)
        if isinstance(value, torch.Generator):
            return _generator, (value.get_state(),)
        if isinstance(value, np.memmap):
            return np.asarray(value).__reduce_ex__(PROTOCOL)  # with a buffer, as other arrays
        if isfunction(value) and (orig := getattr(value, "_torchdynamo_orig_callable", None)) is not None:
            return _compiled, (_compiler_of(value), orig)
        if isinstance(value, nn.Module) and parametrize.is_parametrized(value):
            plain = parametrize.type_before_parametrizations(value)
            return _new_module, (plain,), value.__dict__, None, None, _set_parametrized
        return super().reducer_override(value)

    def _shared(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        return self._storages.setdefault(storage._cdata, storage)


def _bytes_of(storage: torch.UntypedStorage) -> Any:
    """The bytes of a storage; of one on a GPU those of a copy."""
    here: torch.UntypedStorage = storage if storage.device.type == "cpu" else storage.cpu()  # type: ignore[no-untyped-call]
    array: Any = (ctypes.c_char * here.nbytes()).from_address(here.data_ptr() or ctypes.addressof(_NOTHING))
    array.storage = here  # keeps the memory
    return array


_NOTHING = ctypes.c_char()


def _storage(buffer: Any) -> torch.UntypedStorage:
    view = memoryview(buffer)
    if not view.nbytes:
        return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
    if view.readonly:  # in Ray's object store; PyTorch has no tensors that cannot be written
        buffer = bytearray(view)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _generator(state: torch.Tensor) -> torch.Generator:
    made = torch.Generator()
    made.set_state(state)
    return made


def _compiler_of(function: FunctionType) -> Any:
    """What ``torch.compile`` made this function with; None: it is not known, and the defaults are taken."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    context = cells["self"].cell_contents if "self" in cells else None
    return context if callable(context) else None


def _compiled(compiler: Any, function: Any) -> Any:
    return torch.compile(function) if compiler is None else compiler(function)


def _new_module(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


def _set_parametrized(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Makes a parametrized module again, with a class of its own, as ``register_parametrization`` does."""
    module.__dict__.update(state)
    parametrize._inject_new_class(module)
    for name in module.parametrizations:  # type: ignore[union-attr]
        parametrize._inject_property(module, name)


# ---- modules that another process cannot import


@contextlib.contextmanager
def _modules_by_value() -> Iterator[None]:
    """Inside, classes and functions of modules that another process does not find travel by value."""
    registered: list[ModuleType] = []
    found_by_top: dict[str, bool] = {}
    try:
        for name, module in list(sys.modules.items()):
            if _is_only_here(name, module, found_by_top):
                cloudpickle.register_pickle_by_value(module)
                registered.append(module)
        yield
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)


def _is_only_here(name: str, module: Any, known: dict[str, bool]) -> bool:
    """Whether no import of another process finds this module where this process has it from.

    ``known``: the answers for whole packages.
    """
    if type(module) is not ModuleType or module.__name__ != name or name in sys.builtin_module_names:
        return False
    file = getattr(module, "__file__", None) or ""
    if name in ("__main__", "__mp_main__") or file.startswith(_INSTALLED):  # cloudpickle knows the first
        return False
    top = name.partition(".")[0]
    if top not in known:
        known[top] = not _is_found(top)
    return known[top]


def _is_found(top: str) -> bool:
    """Whether an import finds a top-level package or module, and where this process has it from."""
    try:
        spec = next(filter(None, (finder.find_spec(top, None) for finder in sys.meta_path)), None)
    except Exception:  # a finder of somebody else's
        return True
    loaded = getattr(sys.modules.get(top), "__file__", None)
    if spec is None:
        return top not in sys.modules or (getattr(sys.modules[top], "__spec__", None) is not None and loaded is None)
    return not (spec.origin and loaded) or os.path.realpath(spec.origin) == os.path.realpath(loaded)


# ---- what cannot be encoded


def _find_culprit(value: Any, error: Exception) -> tuple[str, Any]:
    """The path to an object that cannot be encoded, as a user writes it, and the object."""
    path, seen = "", set[int]()
    for _ in range(_MAX_DEPTH):
        seen.add(id(value))
        for step, part in _parts(value):
            if id(part) not in seen and not _can_encode(part):
                path += step if path else step.lstrip(".")
                value = part
                break
        else:
            break
    return path, value


def _can_encode(value: Any) -> bool:
    try:
        _encode(value)
    except Exception:
        return False
    return True


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of an object, each with its step in a path. Parts of Hoop's own objects have an empty step."""
    if isinstance(value, Job):
        for name, part in vars(value).items():
            yield f".{name}", part
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield f"[{key!r}]", part
    elif isinstance(value, partial):
        yield from _parts([value.func, *value.args])
        yield from _parts(value.keywords)
    elif type(value) in (list, tuple, set, frozenset):
        for index, part in enumerate(value):
            yield f"[{index}]", part
    elif isfunction(value):
        yield from _parts_of_function(value)
    elif ismethod(value):
        yield "", value.__self__
        yield "", value.__func__
    else:
        shown = not _is_hoops(type(value))
        if isinstance(value, tuple):
            yield from (("", part) for part in value)
        for name, part in getattr(value, "__dict__", {}).items():
            yield f".{name}" if shown else "", part


def _parts_of_function(function: Any) -> Iterator[tuple[str, Any]]:
    shown = not _is_hoops(function)
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it is empty
            yield f".{name}" if shown else "", cell.cell_contents
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield f".{name}", function.__globals__[name]
    for part in function.__defaults__ or ():
        yield "", part


def _is_hoops(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] == "hoop"


def _type_name(value: Any) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.").removeprefix("__main__.")


def _one_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


# ---- decoding


def decode(encoded: Encoded) -> Any:
    """The object again. Only for what a process that started this one has encoded: it executes code."""
    return pickle.loads(encoded.data, buffers=encoded.buffers)  # noqa: S301 - see above


# ---- a file in memory


def write_shared(encoded: Encoded) -> int:
    """A descriptor of a file in memory with an encoded object; ``read_shared`` maps it in another process.

    A buffer that is a file, as of ``np.memmap``, is not copied: the other process maps that file.
    """
    parts: list[memoryview] = [memoryview(buffer) for buffer in (encoded.data, *encoded.buffers)]
    mapped = _mapped_files() if any(part.nbytes >= MAPPED_BYTES for part in parts) else []
    places: list[list[Any]] = []
    end = 0
    for part in parts:
        place = _file_place(part, mapped)
        places.append(place or [end, part.nbytes])
        end += 0 if place else _aligned(part.nbytes)
    head = json.dumps(places).encode()
    begin = _aligned(8 + len(head))
    descriptor = _memory_file()
    try:
        os.ftruncate(descriptor, begin + end)
        _write(descriptor, memoryview(struct.pack("<q", len(head)) + head), 0)
        for part, (at, *_) in zip(parts, places, strict=True):
            if isinstance(at, int):
                _write(descriptor, part, begin + at)
    except OSError as error:
        os.close(descriptor)
        raise ResourceExhausted(
            f"data: {end >> 20} MiB of the job's objects do not fit into this machine's shared memory ({error})"
        ) from None
    return descriptor


def read_shared(descriptor: int) -> Encoded:
    """Maps what ``write_shared`` has written. What this process writes into its objects is its own."""
    view = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY))
    (length,) = struct.unpack_from("<q", view)
    begin = _aligned(8 + length)
    data, *buffers = (_part(view[begin:], *place) for place in json.loads(bytes(view[8 : 8 + length])))
    return Encoded(data, buffers)


def _part(copied: memoryview, at: Any, size: int, offset: int = 0, writable: bool = False) -> memoryview:
    if isinstance(at, int):
        return copied[at : at + size]
    within = offset % mmap.ALLOCATIONGRANULARITY
    with open(at, "r+b" if writable else "rb") as file:
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        return memoryview(mmap.mmap(file.fileno(), within + size, access=access, offset=offset - within))[within:]


class _Mapped(NamedTuple):
    """A file that this process has mapped and shares: what is written there goes to the file."""

    low: int
    high: int
    offset: int
    path: str
    writable: bool


def _mapped_files() -> list[_Mapped]:
    mapped = []
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:  # Linux
        for line in lines:
            span, rights, offset, _, inode, *path = line.rstrip("\n").split(maxsplit=5)
            if rights[3] == "s" and path and os.path.isfile(path[0]) and os.stat(path[0]).st_ino == int(inode):
                low, high = (int(address, 16) for address in span.split("-"))
                mapped.append(_Mapped(low, high, int(offset, 16), path[0], rights[1] == "w"))
    return mapped


def _file_place(part: memoryview, mapped: list[_Mapped]) -> list[Any] | None:
    """The place of a buffer's bytes in a mapped file; None: they are in none, or fewer than ``MAPPED_BYTES``."""
    if part.nbytes < MAPPED_BYTES:
        return None
    low = np.frombuffer(part, np.uint8).ctypes.data
    for file in mapped:
        if file.low <= low and low + part.nbytes <= file.high:
            return [file.path, part.nbytes, file.offset + low - file.low, file.writable]
    return None


def _memory_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("hoop-job")
    with tempfile.TemporaryFile() as file:  # macOS
        return os.dup(file.fileno())


def _write(descriptor: int, part: memoryview, at: int) -> None:
    while part.nbytes:
        written = os.pwrite(descriptor, part, at)
        part, at = part[written:], at + written


def _aligned(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES
