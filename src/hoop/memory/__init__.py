"""A device's memory: one file-backed mapping with addresses, and named buffers inside it.

``Arena`` is the mapping, ``Allocator`` decides (purely) which bytes a name gets, ``header`` makes that
table survive a kill -9, ``backing`` is the file beneath, and ``DType`` says what elements the bytes are.
"""

from hoop.memory.allocator import Allocator
from hoop.memory.arena import Arena, ArenaBuffer
from hoop.memory.dtypes import DType, dtype
from hoop.memory.storage import default_directory

__all__ = ["Allocator", "Arena", "ArenaBuffer", "DType", "default_directory", "dtype"]
