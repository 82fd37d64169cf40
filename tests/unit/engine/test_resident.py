"""Steps on a GPU, as far as they need none: strides, sums along the tree, addresses, and the start of MPS."""

from __future__ import annotations

import os
import random
import stat
from pathlib import Path

import pytest
import torch

from hoop.collectives.shard_tree import Node, merge_plan
from hoop.engine.roles.resident import LOADED_BYTES, stride_for
from hoop.engine.stage.kept_gpu_memory import MAX_STRIDE
from hoop.engine.stage.peer_rows import add_along, row_expression
from hoop.errors import InvalidArgument, OutOfRange
from hoop.launch import mps
from hoop.memory.cuda_arena import CudaArena, SharedBlock


@pytest.mark.parametrize(
    ("step_s", "batch_bytes", "stride"),
    [(0.0, 1, MAX_STRIDE), (0.02, 1, 8), (0.5, 1, 1), (0.0, LOADED_BYTES, 1), (0.0, LOADED_BYTES // 4, 4)],
)
def test_a_stride_is_short_and_its_batches_fit(step_s: float, batch_bytes: int, stride: int) -> None:
    assert stride_for(step_s, batch_bytes) == stride


@pytest.mark.parametrize("shards", [1, 3, 8, 13])
def test_the_sum_of_rows_does_not_depend_on_the_ranks(shards: int) -> None:
    rng = random.Random(shards)
    gradients = torch.randn(shards, 5, generator=torch.Generator().manual_seed(1))
    found = set()
    for ranks in range(1, 6):
        orders: list[list[int]] = [[] for _ in range(ranks)]
        for shard in range(shards):
            rng.choice(orders).append(shard)
        plans = [merge_plan(order, shards) for order in orders]
        rows = [[gradients[shard].clone() for shard in order] for order in orders]
        for plan, mine in zip(plans, rows, strict=True):
            for node, _ in plan.nodes:
                _merge(node, plan.order, mine)
        total = torch.zeros(5)
        add_along(row_expression(plans, shards), rows, total)
        found.add(tuple(total.tolist()))
    assert len(found) == 1


def _merge(node: Node, order: tuple[int, ...], rows: list[torch.Tensor]) -> None:
    if node.high - node.low > 1:
        for half in node.halves:
            _merge(half, order, rows)
        left, right = node.halves
        rows[order.index(left.low)].add_(rows[order.index(right.low)])


def test_addresses_on_the_card_are_checked() -> None:
    arena = CudaArena(0x7000_0000, 1 << 20, owner=False)
    buffer = arena.allocate("rows", 1000)
    assert arena.used == 1000
    assert buffer.address % 256 == 0
    assert arena.at(arena.offset(buffer.address), 1000) == buffer.address
    for offset, size in ((-1, 1), (1 << 20, 1), (0, (1 << 20) + 1), (0, -1)):
        with pytest.raises(OutOfRange, match="GPU memory"):
            arena.at(offset, size)
    with pytest.raises(InvalidArgument, match="no IPC handle"):
        SharedBlock("00", 1 << 20)


def test_gpus_are_counted_without_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert mps.count_gpus(str(tmp_path)) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert mps.count_gpus(str(tmp_path)) == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert mps.count_gpus(str(tmp_path)) == 0


def test_mps_runs_while_devices_share_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a program in the place of the driver's: this machine may have no GPU."""
    monkeypatch.delenv(mps.PIPE_DIRECTORY, raising=False)
    monkeypatch.setattr(mps, "count_gpus", lambda: 1)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(mps, "_DEFAULT_PIPE", tmp_path / "none")
    with mps.shared_gpus(1) as warning:
        assert not warning
        assert mps.PIPE_DIRECTORY not in os.environ
    program = tmp_path / mps.CONTROL
    log = tmp_path / "log"
    program.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = -f ]; then echo start >> {log}; echo $$ > {tmp_path}/pid; exec sleep 600; fi\n'
        f"[ -s {tmp_path}/pid ] || exit 1\n"
        f"read line; echo $line $CUDA_MPS_PIPE_DIRECTORY >> {log}\n"
        f"[ $line != quit ] || kill $(cat {tmp_path}/pid)\n"
    )
    program.chmod(stat.S_IRWXU)
    with mps.shared_gpus(4) as warning:
        assert not warning
        folder = os.environ[mps.PIPE_DIRECTORY]
        assert Path(folder).is_dir()
    assert mps.PIPE_DIRECTORY not in os.environ
    assert not Path(folder).exists()
    lines = log.read_text().splitlines()
    assert "start" in lines
    assert lines[-1] == f"quit {folder}"


def test_a_missing_mps_is_said_with_its_cost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(mps.PIPE_DIRECTORY, raising=False)
    monkeypatch.setattr(mps, "count_gpus", lambda: 1)
    monkeypatch.setattr(mps, "_DEFAULT_PIPE", tmp_path / "none")
    monkeypatch.setenv("PATH", str(tmp_path))
    with mps.shared_gpus(4) as warning:
        assert "4 devices share 1 GPU, and nvidia-cuda-mps-control is not installed" in warning
