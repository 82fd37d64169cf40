"""A process whose forked children could not compute gradients is refused before it forks."""

from __future__ import annotations

from pathlib import Path

import pytest

from hoop.errors import FailedPrecondition
from hoop.launch.forked import check_forkable


def test_autograd_threads_forbid_a_fork(tmp_path: Path) -> None:
    for number, name in ((1, "python3"), (2, "grpc_global_tim")):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "comm").write_text(f"{name}\n")
    check_forkable(str(tmp_path))
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "comm").write_text("pt_autograd_0\n")
    with pytest.raises(FailedPrecondition, match="computed gradients on a machine with a GPU"):
        check_forkable(str(tmp_path))
