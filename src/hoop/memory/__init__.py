"""A device's memory: the arena, a file-backed range of addresses with named buffers that survive a restart.
Nothing here knows of processes or networks.

May import: nothing but the modules directly in hoop.
"""

from hoop.memory.allocator import Allocator
from hoop.memory.arena import Arena, ArenaBuffer
from hoop.memory.dtypes import DType, dtype
from hoop.memory.storage import default_directory

__all__ = ["Allocator", "Arena", "ArenaBuffer", "DType", "default_directory", "dtype"]

PUBLIC = ("allocator", "commit_record", "cuda_arena", "cuda_ipc", "dtypes", "storage")
"""Modules that other rooms may import."""
