"""``hvd.Compression``: what tensors are sent as."""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """Sends tensors as they are. Subclasses name another type for floating-point tensors."""

    dtype: torch.dtype | None = None

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor to send, and what ``decompress`` needs to know."""
        if cls.dtype is None or not tensor.dtype.is_floating_point:
            return tensor, None
        return tensor.to(cls.dtype), tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """The received tensor in its original type."""
        return tensor if context is None else tensor.to(context)


class HalfCompressor(Compressor):
    """float16: half of the bytes of float32; values above 65504 become infinite."""

    dtype = torch.float16


class BfloatCompressor(Compressor):
    """bfloat16: half of the bytes of float32, with its range and 8 bits of precision."""

    dtype = torch.bfloat16


class Compression:
    """The compressors: ``hvd.Compression.none``, ``fp16`` and ``bf16``."""

    none = Compressor
    fp16 = HalfCompressor
    bf16 = BfloatCompressor
