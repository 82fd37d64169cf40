"""A rank dies while emulated GPUs exchange their gradients; the others go on with the same weights.

The ranks exchange over Gloo, with the code that GPUs of several hosts use over NCCL.
"""

from __future__ import annotations

import pytest
from faulty_ranks import Fault, run_with_faults
from forked_ranks import checkpoint, differing, tensors_in
from gloo_group import open_gloo_group
from reported_rows import check_events
from small_jobs import JOBS, alone, alone_losses, settings

from hoop.engine.stage import peer_row_selection

FAULTS = {
    "before its slices are sent": [Fault(1, "exchanges", 12)],
    "before it shares its sum": [Fault(1, "shares", 9)],
    "rank 0, which made the group": [Fault(0, "shares", 7)],
    "while the group connects, before the first step": [Fault(2, "exchanges", 1)],
    "two, one after the other": [Fault(2, "exchanges", 12), Fault(0, "shares", 20)],
}
"""Faults in a run of three ranks. Each connects with an exchange, and measures some steps before the first one."""


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_a_rank_that_dies_in_an_exchange_changes_no_weight(
    faults: list[Fault], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_row_selection, "open_group", open_gloo_group)
    monkeypatch.setattr(peer_row_selection, "StagedRows", None)  # the rows are not summed on the host
    job = "flat"
    results = run_with_faults(3, settings("data", accelerator="emulated"), JOBS[job], faults, scheme="tcp")
    found = [results[rank].outcome for rank in sorted(results)]
    assert len(found) == 3 - len(faults)
    assert not differing(tensors_in(checkpoint(found)), alone(job))
    assert sum(len(one.of("recovered")) for one in found) >= 1
    check_events([one.events for one in found], alone_losses(job))
