"""Every benchmark of training, trainers, prediction, recovery and the dashboard starts; people run them by hand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(
    path
    for theme in ("training", "trainers", "prediction", "recovery", "clusters", "dashboard", "native", "calls")
    for path in (ROOT / "benchmarks" / theme).glob("*.py")
    if "__main__" in path.read_text()
)


def test_scripts_are_found() -> None:
    assert {"mnist.py", "softmax.py", "strategies.py", "kernels.py", "predict.py", "recovery.py"} <= {
        path.name for path in SCRIPTS
    }


HELP_OF_EACH = """
import os, runpy, sys, traceback
import torch, hoop, hoop.lab.chaos.job_watch, hoop.lab.bench.contest, hoop.report.tables, hoop.runs.training
# Loaded once: each script runs in a forked child, and most import these.

codes = {}
for script in sys.argv[1:]:
    if not (child := os.fork()):
        sys.argv, sys.path[0] = [script, "--help"], os.path.dirname(script)
        code = 1
        try:
            runpy.run_path(script, run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1 if code else 0)  # without taking down PyTorch's modules, which takes longer than the script
    codes[script] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
sys.exit(f"failed: {[script for script, code in codes.items() if code]}" if any(codes.values()) else 0)
"""


def test_every_script_starts() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HELP_OF_EACH, *map(str, SCRIPTS)],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^usage: (\S+)", done.stdout, re.M) == [script.name for script in SCRIPTS]
