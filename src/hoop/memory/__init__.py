"""A device's memory: the arena, a file-backed range of addresses with named buffers that survive a restart; or a GPU's.
Nothing here knows of networks. ``gpu_keeper`` starts a process that keeps memory of a GPU alive.

May import: nothing but the modules directly in hoop.
"""

from hoop.memory.allocator import Allocator
from hoop.memory.arena import CHECKS, READS, WRITES, Arena, ArenaBuffer
from hoop.memory.cuda_arena import GpuMemory
from hoop.memory.dtypes import DType, dtype
from hoop.memory.storage import default_directory

__all__ = [
    "CHECKS",
    "READS",
    "WRITES",
    "Allocator",
    "Arena",
    "ArenaBuffer",
    "DType",
    "DeviceMemory",
    "default_directory",
    "dtype",
]

DeviceMemory = Arena | GpuMemory
"""The memory that clients of a device use: its arena, or memory on its GPU."""

PUBLIC = ("allocator", "commit_record", "cuda_arena", "cuda_ipc", "dtypes", "gpu_driver", "gpu_keeper", "storage")
"""Modules that other rooms may import."""
