"""NumPy arrays and torch tensors as bytes of an element type, and back."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from hoop.errors import InvalidArgument
from hoop.memory.dtypes import DType, dtype

Array = npt.NDArray[Any]


def is_tensor(value: object) -> bool:
    """Whether it is a torch tensor; torch is not imported to find out."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def element_type(value: Any) -> DType:
    """The element type of an array or a tensor."""
    if not hasattr(value, "dtype"):
        raise InvalidArgument(f"values: a {type(value).__name__} is neither a NumPy array nor a torch tensor")
    return dtype(str(value.dtype).removeprefix("torch."))


def flatten(value: Any, kind: DType) -> Array:
    """A contiguous vector in the storage type of ``kind``; bfloat16 tensors keep their bits."""
    if is_tensor(value):
        tensor = value.detach().cpu().contiguous()
        if element_type(value) != kind:
            raise InvalidArgument(f"a tensor of {element_type(value).name} was given, {kind.name} is wanted")
        array = tensor.view(sys.modules["torch"].int16).numpy() if kind.name == "bfloat16" else tensor.numpy()
        return np.ascontiguousarray(array).view(kind.numpy).reshape(-1)
    array = np.asarray(value)
    if array.dtype != kind.numpy:
        raise InvalidArgument(f"an array of {array.dtype} was given, {kind.name} is wanted")
    return np.ascontiguousarray(array).reshape(-1)


def restore(vector: Array, like: Any, kind: DType) -> Any:
    """The vector as what ``like`` is, an array or a tensor, and in its shape where the size is the same."""
    if is_tensor(like):
        torch = sys.modules["torch"]
        bits = vector.view(np.int16) if kind.name == "bfloat16" else vector
        tensor = torch.from_numpy(bits.copy())
        tensor = tensor.view(torch.bfloat16) if kind.name == "bfloat16" else tensor
        return tensor.reshape(like.shape) if tensor.numel() == like.numel() else tensor
    like = np.asarray(like)
    return vector.reshape(like.shape) if vector.size == like.size else vector
