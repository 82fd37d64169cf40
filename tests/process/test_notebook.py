"""``hoop.train`` in the cells of a real Jupyter kernel, on this machine and on Ray, with a model of the notebook."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="pip install nbclient ipykernel")
pytest.importorskip("nbclient", reason="pip install nbclient ipykernel")
pytest.importorskip("ipykernel", reason="pip install nbclient ipykernel")

CELL_S = 1_200
pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * CELL_S)]

MODEL = """
import hoop, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
    def forward(self, x):
        return self.layers(x)

torch.manual_seed(1)
points = torch.rand(400, 2) * 4 - 2
labels = (points.norm(dim=1) < 1.2).long()

def trained(**where):
    torch.manual_seed(2)
    how = dict(epochs=2, batch_size=100, shards=4, memory="64MiB")
    return hoop.train(Net(), (points, labels), **how, **where).summary["weights_sha256"]
"""


def run_notebook(cells: list[str], tmp_path: Path) -> str:
    """Runs the cells in one kernel, in order; returns what the last one printed."""
    path = tmp_path / "cells.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(one) for one in cells]), path)
    command = [str(Path(sys.executable).with_name("jupyter-execute")), "--inplace", f"--timeout={CELL_S}", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3 * CELL_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    printed = nbformat.read(path, as_version=4).cells[-1].outputs
    return "".join(one["text"] for one in printed if one.get("name") == "stdout")


def test_cells_train_again_and_again(tmp_path: Path) -> None:
    cells = [MODEL, "one = trained(devices=1)", "two = trained(devices=2)", "print(one == two)"]
    assert run_notebook(cells, tmp_path) == "True\n"


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="pip install 'hoop[ray]'")
def test_a_cell_trains_on_ray(tmp_path: Path) -> None:
    """The class of the model exists in the notebook alone."""
    start = "import ray\nray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)"
    cells = [MODEL, "alone = trained(devices=1)", start, "spread = trained(on=hoop.Ray(devices=2, cpus=0.5))"]
    assert run_notebook([*cells, "ray.shutdown()\nprint(alone == spread)"], tmp_path) == "True\n"
