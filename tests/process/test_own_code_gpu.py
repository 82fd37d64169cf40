"""A user's own batches, loss, optimizer and loop on a GPU: the same weights on any number of devices."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
TRAIN = """
import functools, json, sys
import torch
from torch import nn
import hoop

def loss(model, batch):
    outputs = model(batch["x"])
    total = nn.functional.cross_entropy(outputs, batch["y"], reduction="sum")
    return {"loss": (total, len(batch["y"])), "right": (outputs.argmax(1) == batch["y"]).float().mean()}

generator = torch.Generator().manual_seed(1)
data = {"x": torch.randn(400, 12, generator=generator), "y": torch.randint(4, (400,), generator=generator)}
for devices, faults in json.loads(sys.argv[1]):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4))
    result = hoop.train(
        model, (data, data), loss=loss, optimizer=functools.partial(torch.optim.NAdam, lr=1e-2), faults=faults,
        devices=devices, accelerator="cuda", epochs=2, batch_size=64, shards=6, precision=sys.argv[2],
    )
    found = {"weights": result.weights_sha256, "loss": result.loss, "faults": result.summary["faults"]}
    print(json.dumps(found), flush=True)
"""
LOOP = """
import hashlib
import torch
from torch import nn
import hoop.elastic

torch.manual_seed(0)
torch.cuda.manual_seed_all(0)
model = nn.Sequential(nn.Linear(12, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
inputs, targets = torch.randn(400, 12), torch.randint(4, (400,))
run = hoop.elastic.Run(model=model, optimizer=optimizer, data=(inputs, targets), batch_size=64, shards=6, epochs=3)
for step in run.steps():
    for x, y in step.shards():
        assert x.is_cuda
        step.backward(nn.functional.cross_entropy(model(x), y), weight=len(y))
    step.update()
weights = b"".join(one.detach().cpu().numpy().tobytes() for one in model.state_dict().values())
print("weights", hashlib.sha256(weights).hexdigest(), flush=True)
"""


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_weights_on_cuda_do_not_depend_on_the_number_of_devices_or_a_kill(precision: str) -> None:
    runs = [[1, ""], [2, ""], [3, "kill@rank=1,step=4"], [3, "kill@rank=0,step=5,instruction=update"]]
    lines = run("-c", TRAIN, json.dumps(runs), precision).splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    assert [len(one["faults"]) for one in found] == [0, 0, 1, 1]
    assert len({(one["weights"], one["loss"]) for one in found}) == 1, found


def test_an_own_loop_on_cuda_gives_the_same_weights_on_one_and_two_processes(tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    alone = [line for line in run(str(script)).splitlines() if "weights" in line]
    both = run("-m", "hoop", "run", "-np", "2", str(script)).splitlines()
    assert [line.partition("] ")[2] for line in both if "weights" in line] == alone * 2
