"""A script that leaves the loop of ``hoop.elastic`` while its iterator is still held ends, like any other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LOOP = """
import torch
import hoop.elastic

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.ones(8, 2), torch.ones(8, 1)
run = hoop.elastic.Run(model=model, optimizer=optimizer, data=data, batch_size=4, shards=1)
steps = run.steps()
for step in steps:
    break
print("left")
"""


def test_a_script_that_leaves_the_loop_early_ends(tmp_path: Path) -> None:
    (script := tmp_path / "loop.py").write_text(LOOP)
    # A real start: what is tested is what the interpreter waits for at its end.
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "left\n"), done.stderr
