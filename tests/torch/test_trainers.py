"""The examples of trainers (``examples/trainers``) run on two ranks and give the model of one process, or of Gloo.

Each example runs the real library, by the setting that it documents. FSDP2, pipelining and distributed checkpoints are
part of PyTorch. Lightning, accelerate and transformers are started by their own launchers, and skipped where they are
not installed (``pip install 'hoop[trainers]'``).
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from world import LONG_S, World

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's modules that the examples import
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "trainers"
RANK_LINE = re.compile(r"rank (\d) of (\d) by (\w+): (.*?)(?=rank \d|$)", re.MULTILINE)
"""Printed by each rank of an example at its end; unbuffered, another rank's line may come before its newline."""
START_S = 400.0
"""Longer than a launcher and two ranks take that load a large library, on a busy machine."""
Weights = dict[str, torch.Tensor]


def load_example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def weights_of_ranks(folder: Path) -> list[Weights]:
    return [load_file(folder / f"rank-{rank}.safetensors") for rank in range(2)]


def assert_close(actual: Weights, expected: Weights) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)


def assert_equal(actual: Weights, expected: Weights) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name, tensor in actual.items() if not torch.equal(tensor, expected[name])] == []


# ---- examples of PyTorch's own modules


RunExample = Callable[..., list[str]]


@pytest.fixture
def run_example(world: Callable[..., World]) -> Iterator[RunExample]:
    """Runs an example on every rank, ``run_example("fsdp2", 2, "--steps", "3")``; returns what each rank prints."""
    stores = []

    def run(name: str, size: int, *arguments: str) -> list[str]:
        store = open_store()
        stores.append(store)
        ranks = world(size, joins=False)
        ranks.start(rank_main, size, store.port, str(EXAMPLES / f"{name}.py"), list(arguments))
        outputs: list[str] = ranks.results()
        return outputs

    yield run
    stores.clear()


def open_store() -> dist.TCPStore:
    """As with torchrun the launcher has the store, so that no port must be chosen."""
    return dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=LONG_S), wait_for_workers=False)


def rank_variables(rank: int, size: int, port: int) -> dict[str, str]:
    """The environment variables that torchrun sets, except for those of the host."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def rank_main(rank: int, size: int, port: int, path: str, arguments: list[str]) -> str:
    """Runs the example as one rank; returns what it prints."""
    os.environ.update(rank_variables(rank, size, port), LOCAL_RANK=str(rank))
    sys.argv = [path, *arguments]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


def test_fsdp2_gives_the_model_of_one_process(run_example: RunExample, tmp_path: Path) -> None:
    steps = 4
    printed = run_example("fsdp2", 2, "--steps", str(steps), "--out", str(tmp_path))
    assert [line.startswith(f"rank {rank} of 2 by hoop: loss ") for rank, line in enumerate(printed)] == [True] * 2
    example = load_example("fsdp2")
    model = example.build_model()
    example.train(model, steps, rank=0, size=1)
    first, second = weights_of_ranks(tmp_path)
    assert_equal(first, second)
    assert_close(first, model.state_dict())


@pytest.mark.skipif(
    torch.__version__.startswith("2.9."),
    reason="pipelining of PyTorch 2.9 begins with 8 bytes sent to a receive of 4, at which Gloo aborts too",
)
def test_pipelining_gives_the_model_of_one_process(run_example: RunExample, tmp_path: Path) -> None:
    steps = 3
    printed = run_example("pipelining", 2, "--steps", str(steps), "--out", str(tmp_path))
    assert printed[0] == f"rank 0 of 2 by hoop: {steps} steps\n"
    assert printed[1].startswith(f"rank 1 of 2 by hoop: {steps} steps, loss ")
    example = load_example("pipelining")
    model = example.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        inputs, labels = example.global_batch(step)
        optimizer.zero_grad()
        example.loss_of(model(inputs), labels).backward()
        optimizer.step()
    for rank, stage in enumerate(weights_of_ranks(tmp_path)):
        assert_close(stage, nn.Sequential(*list(model)[2 * rank : 2 * rank + 2]).state_dict())


def test_a_distributed_checkpoint_goes_on_with_other_numbers_of_ranks(run_example: RunExample, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load

    folder = tmp_path / "checkpoint"
    for size, steps, expected in ((2, 3, "steps 0 to 3"), (2, 5, "steps 3 to 5"), (1, 6, "steps 5 to 6")):
        printed = run_example("dcp", size, "--checkpoint", str(folder), "--steps", str(steps))
        beginnings = [f"rank {rank} of {size} by hoop: {expected}, loss " for rank in range(size)]
        assert [line[: len(beginning)] for line, beginning in zip(printed, beginnings, strict=True)] == beginnings
    example = load_example("dcp")
    model, restored = example.build_model(), example.build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(6):
        inputs, labels = example.global_batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    state = {"model": restored.state_dict()}
    load(state, checkpoint_id=folder, no_dist=True)
    assert_close(state["model"], model.state_dict())


# ---- examples of libraries, by their own launchers


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [one for one in packages if find_spec(one) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}: pip install 'hoop[trainers]'")


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def launch(launcher: list[str], name: str, folder: Path, *arguments: str, **variables: str) -> list[str]:
    """Runs an example by a launcher on two ranks, which write their weights to ``folder``; returns their backends."""
    folder.mkdir()
    environment = {key: value for key, value in os.environ.items() if key != "HOOP_REPLACE_GLOO"} | variables
    command = [*launcher, str(EXAMPLES / f"{name}.py"), "--epochs", "1", "--out", str(folder), *arguments]
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=START_S, check=False
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    ranks = {int(rank): backend for rank, size, backend, _ in RANK_LINE.findall(done.stdout) if size == "2"}
    assert sorted(ranks) == [0, 1], done.stdout
    return [ranks[0], ranks[1]]


def assert_model_of_gloo(folder: Path, folder_of_gloo: Path) -> None:
    first, second = weights_of_ranks(folder)
    assert_equal(first, second)
    assert_close(first, weights_of_ranks(folder_of_gloo)[0])


@needs("lightning")
def test_lightning_by_its_strategy(tmp_path: Path) -> None:
    by_hoop, by_gloo = tmp_path / "hoop", tmp_path / "gloo"
    assert launch([sys.executable], "lightning_ddp", by_hoop) == ["hoop"] * 2
    assert launch([sys.executable], "lightning_ddp", by_gloo, "--backend", "gloo") == ["gloo"] * 2
    assert_model_of_gloo(by_hoop, by_gloo)


HUGGING_FACE = [
    pytest.param("hf_trainer", marks=needs("transformers", "accelerate")),
    pytest.param("hf_accelerate", marks=needs("accelerate")),
]


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face_on_cpus(name: str, tmp_path: Path) -> None:
    by_hoop, by_gloo = tmp_path / "hoop", tmp_path / "gloo"
    assert launch(TORCHRUN, name, by_hoop, "--cpu", HOOP_REPLACE_GLOO="1") == ["hoop"] * 2
    assert launch(TORCHRUN, name, by_gloo, "--cpu") == ["gloo"] * 2
    assert_model_of_gloo(by_hoop, by_gloo)


@pytest.mark.gpu
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face_on_a_gpu(name: str, tmp_path: Path) -> None:
    """``ddp_backend="hoop"`` and ``InitProcessGroupKwargs(backend="hoop")``: no variable is set.

    accelerate gives each local rank a GPU of its own. For two ranks to share one, each is local rank 0 of its host.
    """
    store, processes = open_store(), []
    try:
        for rank in range(2):
            command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--epochs", "1", "--out", str(tmp_path)]
            variables = rank_variables(rank, 2, store.port) | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            processes.append(
                subprocess.Popen(command, env=os.environ | variables, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
            )
        for rank, process in enumerate(processes):
            printed, _ = process.communicate(timeout=START_S)
            assert process.returncode == 0
            assert [found[:3] for found in RANK_LINE.findall(printed)] == [(str(rank), "2", "hoop")]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    first, second = weights_of_ranks(tmp_path)
    assert_equal(first, second)
