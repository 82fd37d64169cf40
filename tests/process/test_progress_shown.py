"""What ``hoop.train`` shows in a program, in a terminal and in a notebook; nothing there can end a training."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import pytest

TIMEOUT_S = 400
PROGRAM = """
import torch
import hoop
torch.manual_seed(1)
points = torch.rand(400, 2) * 4 - 2
labels = (points.norm(dim=1) < 1.2).long()
model = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
settings = dict(devices=2, epochs=60, batch_size=100, shards=4, memory="64MiB", faults="kill@rank=1,step=20")
"""
TRAIN = "result = hoop.train(model, (points, labels), **settings)\n"
PRINT = "print(result.weights_sha256)\n"


def run(program: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM + program]
    return subprocess.run(command, text=True, timeout=TIMEOUT_S, check=False, **options)  # type: ignore[call-overload,no-any-return]


def test_a_program_shows_progress_and_recovery_in_a_few_lines() -> None:
    done = run(TRAIN + PRINT, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1, "standard output is the program's"
    for text in ("82 parameters on 2 devices", "epoch   1  loss", "was lost", "goes on with 1 device", "epoch  60"):
        assert text in done.stderr
    assert "240 steps" in done.stderr.splitlines()[-1]
    assert done.stderr.count("\nepoch ") < 60, "not a line for each short epoch"


def test_quiet_shows_nothing() -> None:
    done = run(TRAIN.replace("**settings", "quiet=True, **settings") + PRINT, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("end", ["pipe", "full"])
def test_a_standard_error_that_takes_nothing_does_not_end_the_training(end: str) -> None:
    if end == "full":
        with Path("/dev/full").open("w") as full:
            done = run(TRAIN + PRINT, stdout=subprocess.PIPE, stderr=full)
    else:
        read, write = os.pipe()
        os.close(read)
        done = run(TRAIN + PRINT, stdout=subprocess.PIPE, stderr=write)
        os.close(write)
    assert done.returncode == 0
    assert len(done.stdout.strip()) == 64


def test_a_terminal_shows_one_line_of_progress_below_the_events() -> None:
    main, terminal = pty.openpty()
    shown = bytearray()

    def read() -> None:
        try:
            while part := os.read(main, 1 << 16):
                shown.extend(part)
        except OSError:  # nobody has the terminal open any more
            pass

    reader = threading.Thread(target=read)
    reader.start()
    environment = {**os.environ, "COLUMNS": "80", "TERM": "xterm"}
    done = run(TRAIN + PRINT, stdout=subprocess.PIPE, stderr=terminal, env=environment)
    os.close(terminal)
    reader.join(TIMEOUT_S)
    os.close(main)
    assert done.returncode == 0, shown.decode()
    assert len(done.stdout.strip()) == 64
    lines = shown.decode().replace("\r", "\n").splitlines()
    assert any("epoch 60/60 · " in line and "step 240/240" in line for line in lines)
    assert "goes on with 1 device" in shown.decode()


def test_a_notebook_shows_the_same_in_one_output_of_the_cell(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="pip install nbclient ipykernel")
    pytest.importorskip("ipykernel", reason="pip install nbclient ipykernel")
    pytest.importorskip("nbclient", reason="pip install nbclient ipykernel")
    path = tmp_path / "cells.ipynb"
    cells = [nbformat.v4.new_code_cell(one) for one in (PROGRAM, TRAIN)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    command = [str(Path(sys.executable).with_name("jupyter-execute")), "--inplace", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    outputs = nbformat.read(path, as_version=4).cells[-1].outputs
    (display,) = [output for output in outputs if output.output_type == "display_data"]
    text = display.data["text/plain"]
    for part in ("82 parameters on 2 devices", "was lost", "goes on with 1 device", "epoch  60"):
        assert part in text
    assert "240 steps" in text.splitlines()[-1], "the line of progress is gone at the end"
    assert "step 239" not in text
