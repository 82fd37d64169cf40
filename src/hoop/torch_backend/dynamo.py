"""Keeps TorchDynamo out of the process group.

While a compiled model runs, Dynamo looks at every Python frame that begins, also at those that C++ calls: DDP's reducer
calls ``allreduce`` of the group in the backward pass. The methods of a group and of its works move bytes and wait for
other ranks; there is nothing in them to compile, and Dynamo fails in them.
"""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

Class = TypeVar("Class", bound=type)


def never_compiled(cls: Class) -> Class:
    """A decorator of classes: Dynamo runs their methods, and all that these call, as ordinary Python.

    It marks the methods' code, without loading ``torch._dynamo``, which takes seconds.
    """
    skip = eval_frame._FrameAction.SKIP
    strategy: Any = eval_frame._FrameExecStrategy(skip, skip)
    for member in vars(cls).values():
        function = member.fget if isinstance(member, property) else member
        if inspect.isfunction(function):
            eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return cls
