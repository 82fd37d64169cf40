"""Device memory: one file-backed shared mapping with an address range and named buffers.

``Arena`` is the mapping and its buffer table, which survives kill -9. ``Allocator`` is the pure placement
logic. ``storage`` opens the backing file and defines its layout. ``DType`` is an element type.
"""

from hoop.memory.allocator import Allocator
from hoop.memory.arena import Arena, ArenaBuffer
from hoop.memory.dtypes import DType, dtype
from hoop.memory.storage import default_directory

__all__ = ["Allocator", "Arena", "ArenaBuffer", "DType", "default_directory", "dtype"]
