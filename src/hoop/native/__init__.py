"""Hoop's native core: barriers and all-reduces in shared memory, and kernels for images and weights, in C.

It is called without the interpreter lock. ``core.c``, ``fold_kernels.h`` and ``operand_kernels.h`` are the library;
``build`` compiles it where a C compiler is there, ``library`` loads it. Where there is none, or ``HOOP_NATIVE=0``,
Python, NumPy and PyTorch do the same work: the results have the same bits.

May import: nothing but the modules directly in hoop.
"""

PUBLIC = ("library",)
"""Modules that other rooms may import."""
