"""Trainers and parallel wrappers of PyTorch over Hoop and over Gloo, two ranks each, in turns in one run.

    python benchmarks/trainers/trainers.py --rounds 9

For each workload the ranks of both backends stay alive and train in turns, round by round, so that noise affects both
alike. A round's time is that of the slowest rank; the ratio is the median of the rounds' ratios. At the end both must
have the same weights, to rounding. A workload whose library is not installed is left out, with a line that says so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

RANKS = 2
BACKENDS = ("gloo", "hoop")
START_SECONDS = 600.0
BATCH, SEQUENCE, VOCABULARY, WIDTH = 8, 64, 128, 128


class Turns:
    """One rank's side of the turns: reads numbers of steps from stdin, writes the seconds that they took."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._replies = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print must not be taken for a reply
        self._left = self._steps = 0
        self._started = 0.0

    def begin(self) -> bool:
        """Waits for the next round; False if there is none."""
        assert dist.get_backend() == self._backend, f"the group is of {dist.get_backend()}"
        line = sys.stdin.readline()
        self._left = self._steps = int(line or 0)
        self._started = time.perf_counter()
        return self._left > 0

    def step(self, model: nn.Module) -> bool:
        """Called after every step; at the end of a round it waits for the next one. False: stop."""
        self._left -= 1
        if self._left:
            return True
        seconds = (time.perf_counter() - self._started) / self._steps
        total = torch.zeros((), dtype=torch.float64)
        for parameter in model.parameters():
            local: Any = parameter.detach()
            local = local.to_local() if hasattr(local, "to_local") else local
            total += local.double().square().sum()
        dist.all_reduce(total)
        self._replies.write(json.dumps({"seconds": seconds, "weights": float(total)}) + "\n")
        self._replies.flush()
        return self.begin()


# ---- workloads: each is called in every rank, and trains until there are no more turns


def tokens_of(step: int, rank: int) -> torch.Tensor:
    """A batch of sequences that count, another one at each step."""
    generator = torch.Generator().manual_seed(step * RANKS + rank)
    return (torch.randint(VOCABULARY, (BATCH, 1), generator=generator) + torch.arange(SEQUENCE)) % VOCABULARY


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": WIDTH, "n_head": 4, "n_positions": SEQUENCE, "vocab_size": VOCABULARY}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **ends, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def gpt2_ddp(turns: Turns, backend: str) -> None:
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group(backend)
    model = DistributedDataParallel(gpt2())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step, going = 0, turns.begin()
    while going:
        tokens = tokens_of(step, dist.get_rank())
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        step, going = step + 1, turns.step(model)


class Block(nn.Module):
    """A layer of a transformer, its attention and its two linear layers written out for tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        normed = self.norms[0](inputs)
        heads = [
            one(normed).unflatten(-1, (-1, WIDTH // 4)).transpose(1, 2) for one in (self.query, self.key, self.value)
        ]
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        inputs = inputs + self.out(attended.transpose(1, 2).flatten(2))
        return inputs + self.down(nn.functional.gelu(self.up(self.norms[1](inputs))))


def transformer() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Block(), Block(), nn.Linear(WIDTH, VOCABULARY))


def train_plainly(model: nn.Module, turns: Turns, same_batch: bool) -> None:
    """``same_batch``: all ranks get the same tokens, as with tensor parallelism."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step, going = 0, turns.begin()
    while going:
        tokens = tokens_of(step, 0 if same_batch else dist.get_rank())
        optimizer.zero_grad()
        outputs = model(tokens)
        nn.functional.cross_entropy(outputs[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        step, going = step + 1, turns.step(model)


def tensor_parallel(turns: Turns, backend: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    dist.init_process_group(backend)
    model, mesh = transformer(), init_device_mesh("cpu", (RANKS,))
    split = dict.fromkeys(("query", "key", "value", "up"), ColwiseParallel())
    for block in list(model)[1:3]:
        parallelize_module(block, mesh, split | dict.fromkeys(("out", "down"), RowwiseParallel()))
    train_plainly(model, turns, same_batch=True)


class Feed(nn.Module):
    """The feed-forward half of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.down(nn.functional.gelu(self.up(self.norm(inputs))))


def sequence_parallel(turns: Turns, backend: str) -> None:
    """Each rank has its part of the sequences: an all_gather before each layer, a reduce_scatter after it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    dist.init_process_group(backend)
    torch.manual_seed(0)
    feeds = [Feed() for _ in range(4)]
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *feeds, nn.Linear(WIDTH, VOCABULARY))
    mesh = init_device_mesh("cpu", (RANKS,))
    split = {"up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1))}
    for feed in feeds:
        parallelize_module(feed, mesh, split)
    train_plainly(model, turns, same_batch=False)


def fsdp2(turns: Turns, backend: str) -> None:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group(backend)
    model = transformer()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    train_plainly(model, turns, same_batch=False)


def lightning_ddp(turns: Turns, backend: str) -> None:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = transformer()

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            outputs, tokens = self.net(batch[0]), batch[0]
            return nn.functional.cross_entropy(outputs[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

        def on_train_start(self) -> None:
            turns.begin()

        def on_train_batch_end(self, *_: Any) -> None:
            if not turns.step(self.net):
                self.trainer.should_stop = True

    tokens = (torch.arange(64 * BATCH)[:, None] + torch.arange(SEQUENCE)) % VOCABULARY
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens), batch_size=BATCH)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=DDPStrategy(process_group_backend=backend),
        max_epochs=-1,
        **quiet,  # type: ignore[arg-type]
    )
    trainer.fit(Module(), batches)


def hf_trainer(turns: Turns, backend: str) -> None:
    import tempfile

    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Take(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            turns.begin()

        def on_step_end(self, arguments: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if not turns.step(model):
                control.should_training_stop = True

    class Counting(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 64 * BATCH

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            tokens = (index + torch.arange(SEQUENCE)) % VOCABULARY
            return {"input_ids": tokens, "labels": tokens}

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,  # HOOP_REPLACE_GLOO=1 in the environment makes the group Hoop's
            num_train_epochs=10_000,
            per_device_train_batch_size=BATCH,
            optim="sgd",
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        Trainer(gpt2(), arguments, train_dataset=Counting(), callbacks=[Take()]).train()


@dataclass(frozen=True)
class Workload:
    title: str
    run: Callable[[Turns, str], None]
    needs: tuple[str, ...] = ()


WORKLOADS = {
    "gpt2": Workload("GPT-2 tiny, DDP", gpt2_ddp, ("transformers",)),
    "tensor-parallel": Workload("tensor parallel", tensor_parallel),
    "sequence-parallel": Workload("sequence parallel", sequence_parallel),
    "fsdp2": Workload("FSDP2", fsdp2),
    "lightning": Workload("Lightning, DDPStrategy", lightning_ddp, ("lightning",)),
    "trainer": Workload("Hugging Face Trainer, GPT-2 tiny", hf_trainer, ("transformers", "accelerate")),
}


# ---- the side of the benchmark


@dataclass
class Team:
    """The ranks of one workload by one backend. This process has their store, as torchrun would."""

    workload: str
    backend: str
    times: list[float] = field(default_factory=list)
    weights: float = 0.0

    def __post_init__(self) -> None:
        timeout = timedelta(seconds=START_SECONDS)
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, timeout, wait_for_workers=False)
        shared = {
            "WORLD_SIZE": str(RANKS),
            "LOCAL_WORLD_SIZE": str(RANKS),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_RUN_ID": f"{self.workload}-{self.backend}",
            "OMP_NUM_THREADS": "1",
            "HOOP_REPLACE_GLOO": "1" if self.backend == "hoop" else "0",
        }
        self._processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", f"{self.workload} {self.backend}"],
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]

    def run(self, steps: int) -> float:
        """Seconds a step, of the slowest rank."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        answers = []
        for rank, process in enumerate(self._processes):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"{self.workload} by {self.backend}: rank {rank} ended with code {process.wait()}")
            answers.append(json.loads(line))
        assert len({answer["weights"] for answer in answers}) == 1, f"{self.backend}: ranks have different weights"
        self.weights = answers[0]["weights"]
        return max(float(answer["seconds"]) for answer in answers)

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()


def measure(name: str, rounds: int, steps: int) -> dict[str, Any]:
    teams = [Team(name, backend) for backend in BACKENDS]
    try:
        for team in teams:
            team.run(max(steps // 4, 5))
        for index in range(rounds):
            for team in teams if index % 2 else reversed(teams):
                team.times.append(team.run(steps))
    finally:
        for team in teams:
            team.close()
    gloo, hoop = teams
    difference = abs(gloo.weights - hoop.weights) / abs(gloo.weights)
    assert difference < 1e-4, f"{name}: sums of squared weights are {gloo.weights} and {hoop.weights}"
    ratios = [one / other for one, other in zip(gloo.times, hoop.times, strict=True)]
    return {
        "workload": WORKLOADS[name].title,
        "gloo_ms": statistics.median(gloo.times) * 1e3,
        "hoop_ms": statistics.median(hoop.times) * 1e3,
        "ratio": statistics.median(ratios),
        "ratios": [min(ratios), max(ratios)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=40, help="steps a round")
    parser.add_argument("--only", action="append", choices=list(WORKLOADS), help="may be repeated; default: all")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        name, backend = options.rank.split()
        torch.set_num_threads(1)
        WORKLOADS[name].run(Turns(backend), backend)
        if dist.is_initialized():
            dist.destroy_process_group()
        return
    results = []
    if not options.json:
        print("| | Gloo, ms a step | Hoop, ms a step | speed, Gloo = 1 | slowest, fastest round |", flush=True)
        print("|---|---|---|---|---|", flush=True)
    for name in options.only or WORKLOADS:
        missing = [one for one in WORKLOADS[name].needs if find_spec(one) is None]
        if missing:
            print(f"{name} is left out: {', '.join(missing)} is not installed", file=sys.stderr)
            continue
        results.append(measure(name, options.rounds, options.steps))
        if not options.json:
            one = results[-1]
            low, high = one["ratios"]
            print(
                f"| {one['workload']} | {one['gloo_ms']:.2f} | {one['hoop_ms']:.2f} | {one['ratio']:.2f}x "
                f"| {low:.2f}x, {high:.2f}x |",
                flush=True,
            )
    if options.json:
        print(json.dumps(results))
    else:
        print(
            f"\n{RANKS} ranks, {options.rounds} rounds of {options.steps} steps; {os.cpu_count()} cores, "
            f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
        )


if __name__ == "__main__":
    main()
