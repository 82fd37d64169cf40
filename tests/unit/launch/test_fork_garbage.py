"""A forked device never collects garbage of its parent process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

PROGRAM = """
import asyncio, gc, os
import grpc
from hoop.launch.forked import fork

class Node: pass

async def use() -> None:
    node = Node()
    node.channel = grpc.aio.insecure_channel("127.0.0.1:1")
    node.itself = node  # a cycle: only the garbage collector finds it

gc.disable()
asyncio.run(use())
pid = fork(lambda: gc.collect() and None, set())
os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_garbage_of_the_parent_is_not_collected_in_the_child() -> None:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], start_new_session=True)
    try:
        assert process.wait(300) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):  # the child, if it hangs
            os.killpg(process.pid, signal.SIGKILL)
