"""``hoop.train`` in a program that has done something before, run as a user runs it.

Plain ``subprocess``, not the server that forks commands; no variable for the number of threads; a parameter of more
than 32,768 elements, from which on PyTorch computes with several threads, on every architecture.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

HEAD = """
import functools, threading
import torch
from torch import nn
import hoop

def new_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 2048), nn.GELU(), nn.Linear(2048, 5))

rows = torch.Generator().manual_seed(1)
data = {"x": torch.randn(96, 64, generator=rows), "y": torch.randint(0, 5, (96,), generator=rows)}

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])

def train(given=data, model=None, **more):
    return hoop.train(model or new_model(), given, loss=loss, devices=2, epochs=1, batch_size=32, shards=4,
                      optimizer=functools.partial(torch.optim.AdamW, lr=1e-3), **more).weights_sha256
"""
SAMPLES = """
class Samples(torch.utils.data.Dataset):
    def __len__(self): return 96
    def __getitem__(self, index): return {"x": data["x"][index], "y": data["y"][index]}
"""
PRODUCT = "torch.set_num_threads(16)\ntorch.randn(2000, 600) @ torch.randn(600, 2000)\n"
GRADIENTS = """
model = new_model()
for _ in range(3):
    loss(model, data)[0].backward()
torch.optim.SGD(model.parameters(), lr=0.1).step()
"""
WORKERS = """
from torch.utils.data import DataLoader
for batch in DataLoader(Samples(), batch_size=16, num_workers=2):
    loss(new_model(), batch)[0].backward()
"""
THREAD = "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
GRPC = """
import grpc
channel = grpc.insecure_channel("127.0.0.1:1")
try:
    grpc.channel_ready_future(channel).result(timeout=0.2)
except grpc.FutureTimeoutError:
    pass
"""
CONNECTED = """
import subprocess, sys
coordinator = subprocess.Popen([sys.executable, "-m", "hoop", "coordinator"], stdout=subprocess.PIPE, text=True)
with hoop.connect(coordinator.stdout.readline().split()[-1]) as cluster:
    cluster.status()
"""
NUMPY = "import numpy\nnumpy.linalg.svd(numpy.random.default_rng(1).normal(size=(600, 600)) @ numpy.ones((600, 600)))\n"
LAST = "\nprint(train())\n"
BEFORE = {
    "everything": SAMPLES + PRODUCT + NUMPY + GRADIENTS + WORKERS + THREAD + GRPC + LAST,
    "a question for GPUs": "torch.cuda.is_available()" + LAST,
    "a loop of asyncio": "import asyncio\nasync def cell():\n    return train()\nprint(asyncio.run(cell()))",
    "a training, and a thread that trains": THREAD
    + "one = []\nagain = threading.Thread(target=lambda: one.append(train()))\n"
    "again.start()\nagain.join()\nassert train() == one[0]\nprint(one[0])",
    "a compiled loss": "loss = torch.compile(loss, backend='eager')\nloss(new_model(), data)\n" + LAST,
    "a compiled model": "print(train(model=torch.compile(new_model(), backend='eager')))",
    "samples of workers": SAMPLES + "print(train(Samples(), num_workers=2))",
    "hoop.connect": CONNECTED + LAST + "coordinator.terminate()\ncoordinator.wait()\n",
    "300 MB": "more = torch.zeros(75_000_000)\nclass Large(nn.Sequential): pass\n"
    "def loss(model, batch, plain=loss):\n    assert len(more) == 75_000_000\n    return plain(model, batch)\n" + LAST,
}
SHORT = ("everything",)


def run_program(program: str, *arguments: str, folder: Path, **options: str) -> subprocess.CompletedProcess[str]:
    """Runs a program that comes by standard input, or, with arguments, that they name."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("OMP_", "MKL_", "HOOP_"))}
    return subprocess.run(
        [sys.executable, *(arguments or ("-",))],
        input=program,
        cwd=folder,
        env={**environment, **options},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def shown(program: str, *arguments: str, folder: Path) -> str:
    done = run_program(program, *arguments, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of a program that has done nothing before."""
    return shown(HEAD + LAST, folder=tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name not in SHORT else []) for name in BEFORE]
)
def test_what_a_program_did_before_does_not_matter(name: str, weights: str, tmp_path: Path) -> None:
    if name == "a compiled model":  # its parameters have other names, which are in the hash
        assert len(shown(HEAD + BEFORE[name], folder=tmp_path)) == len(weights)
        return
    assert shown(HEAD + BEFORE[name], folder=tmp_path) == weights


CUDA = {
    "is_available": "assert torch.cuda.is_available()",
    "tensors": "kept = torch.ones(10, device='cuda') @ torch.ones(10, device='cuda')",
    "gradients": "new_model().cuda()(torch.ones(4, 64, device='cuda')).sum().backward()",
    "the data": "data = {key: one.cuda() for key, one in data.items()}",
    "the model": "plain_model = new_model\ndef new_model(): return plain_model().cuda()",
}


@pytest.mark.gpu
def test_a_program_may_use_a_gpu(tmp_path: Path) -> None:
    weights = shown(HEAD + "print(train(accelerator='cuda'))", folder=tmp_path)
    for before in CUDA.values():
        assert shown(HEAD + before + "\nprint(train(accelerator='cuda'))", folder=tmp_path) == weights
    (tmp_path / "my_job.py").write_text("import torch\nassert torch.cuda.is_available()\n" + HEAD + JOB)
    result = json.loads(shown("", *TRAIN, "--accelerator", "cuda", folder=tmp_path))
    assert result["weights_sha256"] == weights


SCRIPT = "import counted\nfrom beside import loss\n" + LAST
TEST = HEAD + "\ndef test_training():\n    print(train())\n"


@pytest.mark.slow
def test_the_forms_of_a_program(weights: str, tmp_path: Path) -> None:
    """A file without a ``__main__`` guard, which is executed once; modules beside it; ``python -c``; pytest."""
    (tmp_path / "counted.py").write_text("import os\nprint('executed', os.getpid(), file=open('log', 'a'))\n")
    (tmp_path / "beside.py").write_text(f"import threading\n{THREAD}{HEAD}")
    (tmp_path / "script.py").write_text(HEAD + SCRIPT)
    assert shown("", "script.py", folder=tmp_path) == weights
    assert (tmp_path / "log").read_text().count("executed") == 1
    assert shown("", "-c", HEAD + LAST, folder=tmp_path) == weights
    (tmp_path / "test_it.py").write_text(TEST)
    for mode in ("prepend", "importlib"):
        arguments = ("-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "--import-mode", mode, "test_it.py")
        done = run_program("", *arguments, folder=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert weights in done.stdout


LOCK = (
    SAMPLES
    + """
class Guarded(Samples):
    def __init__(self):
        self.lock = threading.Lock()
try:
    train(Guarded())
except hoop.HoopError as error:
    print(error)
"""
)


def test_what_cannot_travel_is_named(tmp_path: Path) -> None:
    assert shown(HEAD + LOCK, folder=tmp_path).startswith("data.lock: a lock cannot be sent to the devices")


JOB = """
import os
from hoop.data.user_data import user_data
print("executed by", os.getpid(), file=open("log", "a"))
settings = {"epochs": 1, "batch_size": 32, "shards": 4}
optimizer = functools.partial(torch.optim.AdamW, lr=1e-3)
job = hoop.Job(lambda seed: new_model(), lambda: user_data(data).splits, loss, settings, optimizer=optimizer)
"""
TRAIN = ("-m", "hoop", "train", "my_job.py:job", "-n", "2", "--json")


@pytest.mark.slow
@pytest.mark.parametrize(("before", "executions"), [("", 1), (THREAD + PRODUCT, 3)])
def test_a_file_of_a_command_may_start_threads(before: str, executions: int, weights: str, tmp_path: Path) -> None:
    """Then the command is not forked: each of two devices executes the file again."""
    (tmp_path / "my_job.py").write_text(HEAD + before + JOB)
    assert json.loads(shown("", *TRAIN, folder=tmp_path))["weights_sha256"] == weights
    assert len((tmp_path / "log").read_text().splitlines()) == executions


KEPT = """
import os
from hoop.runs.clean_process import idle_process
weights = train()
kept = idle_process().pid
os.mkdir("elsewhere"), os.chdir("elsewhere")
os.environ["PYTEST_CURRENT_TEST"] = "another"
assert train() == weights and idle_process().pid == kept
opened = {os.readlink(f"/proc/{kept}/fd/{number}") for number in os.listdir(f"/proc/{kept}/fd")}
assert not [path for path in opened if path != "/dev/null" and not path.startswith("socket:")], opened
assert "hoop-job" not in open(f"/proc/{kept}/maps").read()
if not os.fork():  # a child of the program does not end it, and does not use it
    os._exit(idle_process() is not None)
assert os.wait()[1] == 0
try:
    train(nonsense=1)
except hoop.HoopError:
    assert idle_process().pid == kept
os.environ["OMP_NUM_THREADS"] = "1"
assert train() == weights and idle_process().pid != kept
assert not os.path.exists(f"/proc/{kept}")
print(idle_process().pid, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="looks at processes as Linux shows them")
def test_the_clean_process_is_kept_while_it_is_like_a_new_one(tmp_path: Path) -> None:
    """It has nothing of a job, and ends with its program, however that ends."""
    done = run_program(HEAD + KEPT, folder=tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    try:
        kept = os.pidfd_open(int(done.stdout.splitlines()[-1]))
    except ProcessLookupError:
        return
    try:
        assert select.select([kept], [], [], 100)[0], "the kept process lives"
    finally:
        os.close(kept)


EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
RUN = ("-m", "hoop", "run", "-np", "2")


@dataclass(frozen=True)
class Example:
    """How an example is run, as its docstring says, with options that make it short."""

    options: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()
    needs: str = ""
    """A module that is not installed everywhere."""
    environment: Mapping[str, str] = field(default_factory=dict)
    by_default: bool = False


GLOO = {"HOOP_REPLACE_GLOO": "1"}
RUNS = {
    "own_code/language_model.py": Example(("--epochs", "1", "--devices", "2"), by_default=True),
    "own_code/augmented_images.py": Example(("--epochs", "1", "--devices", "2")),
    "own_code/gan.py": Example(),
    "own_code/own_loop.py": Example(),
    "custom_model.py": Example(("--epochs", "1", "--devices", "2")),
    "lab_training.py": Example(("--steps", "20", "--devices", "2")),
    "torch_backend.py": Example(("--steps", "20")),
    "horovod/elastic.py": Example(("--kill-rank", "1"), ("-m", "hoop", "run", "-np", "3", "--min-np", "2")),
    "horovod/mnist.py": Example(("--epochs", "1"), RUN),
    "horovod/synthetic_benchmark.py": Example(
        ("--num-iters", "1", "--num-batches-per-iter", "1"), RUN, by_default=True
    ),
    "trainers/dcp.py": Example(("--checkpoint", "counting", "--steps", "5"), TORCHRUN),
    "trainers/fsdp2.py": Example((), TORCHRUN),
    "trainers/pipelining.py": Example((), TORCHRUN, by_default=True),
    "trainers/lightning_ddp.py": Example(needs="lightning"),
    "trainers/hf_trainer.py": Example(("--cpu",), TORCHRUN, "transformers", GLOO),
    "trainers/hf_accelerate.py": Example(("--cpu",), TORCHRUN, "accelerate", GLOO),
    "ray/train.py": Example(needs="ray"),
    "ray/torch_trainer.py": Example(needs="ray.train"),
}


NOT_RUN_HERE = {"lab_client.py", "gpu_sim_messages.py"}
"""The first needs a server and is run by test_lab_client.py, the second is a table and not a program."""


def test_every_example_is_in_the_table() -> None:
    names = {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.py")}
    assert names == {*RUNS, *NOT_RUN_HERE}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if example.by_default else [pytest.mark.slow]) for name, example in RUNS.items()],
)
def test_an_example_runs_as_a_user_runs_it(name: str, tmp_path: Path) -> None:
    example = RUNS[name]
    if example.needs:
        pytest.importorskip(example.needs, reason=f"{example.needs} is not installed", exc_type=ImportError)
    command = (*example.launcher, str(EXAMPLES / name), *example.options)
    done = run_program("", *command, folder=tmp_path, **example.environment)
    assert done.returncode == 0, done.stdout + done.stderr


ENDLESS = """
def on_event(event):
    if event["kind"] == "steps":
        print("steps", flush=True)
hoop.train(new_model(), data, loss=loss, devices=2, epochs=1000000, batch_size=32, progress=on_event)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_the_program(number: signal.Signals, tmp_path: Path) -> None:
    """Each process of the training holds the program's standard error, until it has ended."""
    read, write = os.pipe()
    command = [sys.executable, "-c", HEAD + ENDLESS]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=write, text=True, env=environment) as process:
        os.close(write)
        assert process.stdout is not None
        assert process.stdout.readline() == "steps\n"
        process.send_signal(number)
        process.wait(100)
    with os.fdopen(read) as errors:
        assert select.select([errors], [], [], 100)[0], "a process lives"
        errors.read()
