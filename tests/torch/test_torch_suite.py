"""A few of the tests that PyTorch ships for its own backends; ``scripts/torch_suite --compare`` runs all of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import preloaded

from hoop.torch_backend.work import ENDS_IN_ANY_THREAD

ROOT = Path(__file__).resolve().parents[2]
RUN_SCRIPT = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
"""A script without ``.py`` in its name, in a process that has imported torch."""
NAMES = [
    "test_all_gather_object_subgroup",
    "test_all_reduce_coalesced_full_group_max",
    "test_all_reduce_sum_async",
    "test_barrier_timeout_full_group",
    "test_ddp_logging_data_cpu",
    "test_isend",
    "test_monitored_barrier_gloo",
    "test_send_recv_any_source_torch_profiler",
    "test_static_graph_api_cpu",
]
PROFILED = {
    "test_all_reduce_coalesced_full_group_max",
    "test_all_reduce_sum_async",
    "test_send_recv_any_source_torch_profiler",
}
"""They need profiler events that end in another thread; in an older torch only a C++ backend can record them."""
if not ENDS_IN_ANY_THREAD:
    NAMES = [name for name in NAMES if name not in PROFILED]


def test_tests_of_pytorch_pass(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "-c", RUN_SCRIPT, str(ROOT / "scripts" / "torch_suite")]
    command += ["--world-size", "3", "--limit", "240"]
    command += ["--json", str(out), "--log", str(tmp_path / "log"), *(f"-k={name}$" for name in NAMES)]
    done = preloaded.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {name: outcome["status"] for name, outcome in json.loads(out.read_text()).items()} == dict.fromkeys(
        NAMES, "passed"
    )
