"""The folder of ``hoop.train`` with objects of a program, after that program: its weights, its loss, its next epoch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import preloaded
import torch
from safetensors.torch import load_file, load_model

END_S = 300.0
MODEL = """
import functools
import torch
from torch import nn

def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 3))

torch.manual_seed(1)
inputs, targets = torch.randn(96, 4), torch.randint(0, 3, (96,))
loss, optimizer = nn.CrossEntropyLoss(), functools.partial(torch.optim.AdamW, lr=1e-2)
"""
PROGRAM = """
import json, sys, torch, hoop
from model import *
model = build()
found = hoop.train(model, (inputs, targets), loss=loss, optimizer=optimizer, devices=1, epochs=int(sys.argv[2]),
                   batch_size=32, seed=5, out=sys.argv[1])
torch.save(model.state_dict(), sys.argv[1] + ".pt")
print(json.dumps(dict(found.summary)))
"""
JOB = """
import sys
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent))
import hoop
from hoop.data.user_data import user_data
from model import *
job = hoop.Job(model=build, data=lambda: user_data((inputs, targets)).splits, loss=loss, optimizer=optimizer)
"""
Run = Callable[..., CompletedProcess[str]]


def test_a_folder_is_exported_evaluated_and_resumed_without_the_program_that_made_it(
    tmp_path: Path, run_hoop: Run
) -> None:
    for name, text in {"model.py": MODEL, "program.py": PROGRAM, "job.py": JOB}.items():
        (tmp_path / name).write_text(text)

    def trained(out: Path, epochs: int) -> dict[str, object]:
        command = [sys.executable, str(tmp_path / "program.py"), str(out), str(epochs)]
        done = preloaded.run(command, capture_output=True, text=True, timeout=END_S)
        assert done.returncode == 0, done.stderr
        result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
        return result

    def hoop(*arguments: object, code: int = 0) -> CompletedProcess[str]:
        done = run_hoop(*arguments, within=END_S)
        assert done.returncode == code, done.stderr
        return done

    out, exported, job = tmp_path / "run", tmp_path / "model.safetensors", f"{tmp_path / 'job.py'}:job"
    result, longer = trained(out, 1), trained(tmp_path / "longer", 2)
    hoop("export", out, "--to", exported)
    weights = torch.load(f"{out}.pt")
    assert {name: one.tolist() for name, one in load_file(exported).items()} == {
        name: one.tolist() for name, one in weights.items()
    }
    load_model(torch.nn.Sequential(*_layers()), exported)

    assert "--job file.py:name" in hoop("evaluate", out, code=2).stderr
    measured = json.loads(hoop("evaluate", out, "--job", job, "--json").stdout)
    assert measured["weights_sha256"] == result["weights_sha256"]
    assert abs(measured["loss"] - float(str(result["loss"]))) < 1e-6

    assert "hoop train file.py:name --resume" in hoop("train", "--resume", "--out", out, code=2).stderr
    again = json.loads(hoop("train", job, "--resume", "--out", out, "--set", "epochs=2", "--json").stdout)
    assert again["weights_sha256"] == longer["weights_sha256"]
    hoop("audit", out)


def _layers() -> list[torch.nn.Module]:
    return [torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.GELU(), torch.nn.Linear(8, 3)]
