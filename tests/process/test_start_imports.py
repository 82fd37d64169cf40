"""What a training process imports: modules that take seconds and that Hoop does not need stay out."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import torch
from torch import nn
from hoop.engine.stage.accelerator import use_deterministic_algorithms
from hoop.engine.stage.autograd import AutogradStage
from hoop.engine.trainer import Trainer

use_deterministic_algorithms()
blocks = [nn.Linear(3, 2), nn.Tanh()]
parameters = list(blocks[0].parameters())
stage = AutogradStage([(blocks, len(parameters))], 0, parameters)
outputs = stage.forward(0, torch.ones(4, 3), 0)
into = [torch.zeros_like(one) for one in parameters]
stage.backward(0, torch.ones_like(outputs), into, False)
assert into[1].abs().sum() > 0
assert torch.are_deterministic_algorithms_enabled()
print(*sorted(set(sys.modules) & {"sympy", "torch._dynamo", "torch._inductor.config"}))
"""


def test_a_step_imports_neither_sympy_nor_the_compiler() -> None:
    """``torch.autograd.grad`` and ``torch.use_deterministic_algorithms`` would: 1 to 6 s of every start."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr
