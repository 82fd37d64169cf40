"""GPU memory that outlives the process that has allocated it: emulated, and on a GPU where there is one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hoop.errors import HoopError
from hoop.memory.cuda_arena import GRANULE, CudaArena
from hoop.memory.gpu_driver import EmulatedGpu, open_gpu
from hoop.memory.gpu_keeper import GpuKeeper, can_keep, take_descriptor

pytestmark = pytest.mark.skipif(not can_keep(), reason="keepers need Linux")
LONG_S = 120.0
KINDS = ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]
DEVICE = """
import os, sys, time
from hoop.memory.cuda_arena import CudaArena
from hoop.memory.gpu_driver import open_gpu
from hoop.memory.gpu_keeper import GpuKeeper

arena, descriptor = CudaArena.create_described(1000, open_gpu(sys.argv[1]))
keeper = GpuKeeper(descriptor)
os.close(descriptor)
arena.write(arena.at(500, 8), b"the same")
print(keeper.path, flush=True)
sys.stdin.read()
"""


def wait_until_gone(path: str) -> None:
    deadline = time.monotonic() + LONG_S
    while Path(path).exists():
        assert time.monotonic() < deadline, f"{path} is there after {LONG_S:g} s"
        time.sleep(0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_a_restarted_process_finds_the_memory_of_one_that_was_killed(kind: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", DEVICE, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as device:
        assert device.stdout is not None
        path = device.stdout.readline().strip()
        device.send_signal(signal.SIGKILL)
    descriptor = take_descriptor(path)
    assert descriptor is not None
    gpu = open_gpu(kind)
    assert gpu is not None
    arena = CudaArena.attach_described(descriptor, GRANULE, gpu)
    os.close(descriptor)
    assert arena.read(arena.at(500, 8), 8) == b"the same"
    arena.close()
    gpu.close()
    wait_until_gone(path)
    assert take_descriptor(path) is None, "it is given once"


def test_memory_is_not_kept_after_an_orderly_end() -> None:
    descriptor = os.memfd_create("test")
    keeper = GpuKeeper(descriptor)
    os.close(descriptor)
    assert Path(keeper.path).stat().st_mode & 0o777 == 0o600, "other users get nothing"
    keeper.close()
    assert not Path(keeper.path).exists()
    assert take_descriptor(keeper.path) is None


def test_memory_is_kept_for_a_limited_time() -> None:
    descriptor = os.memfd_create("test")
    keeper = GpuKeeper(descriptor, keep_s=0.0)
    os.close(descriptor)
    assert keeper._process.stdin is not None
    keeper._process.stdin.close()  # as if this process had been killed
    wait_until_gone(keeper.path)
    keeper.close()


def test_a_signal_to_the_process_group_does_not_reach_the_keeper() -> None:
    descriptor = os.memfd_create("test")
    keeper = GpuKeeper(descriptor)
    os.close(descriptor)
    assert os.getsid(keeper._process.pid) == keeper._process.pid
    keeper.close()


def test_a_described_block_is_mapped_twice_and_checked() -> None:
    gpu = EmulatedGpu()
    arena, descriptor = CudaArena.create_described(1, gpu)
    assert arena.capacity == GRANULE
    other = CudaArena.attach_described(descriptor, GRANULE, EmulatedGpu())
    arena.write(arena.at(0, 3), np.array([1, 2, 3], np.uint8))
    assert other.read(other.at(0, 3), 3) == bytes([1, 2, 3])
    with pytest.raises(HoopError, match="cannot be mapped"):
        CudaArena.attach_described(descriptor, 2 * GRANULE, EmulatedGpu())
    os.close(descriptor)
    arena.close()
    other.close()
