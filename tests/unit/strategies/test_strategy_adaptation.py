"""A strategy adapts to the number of devices that are left."""

from __future__ import annotations

import pytest

from hoop.errors import FailedPrecondition
from hoop.plan.validation import check
from hoop.strategies.catalog import parse, plan_for_devices

BLOCKS = 5


@pytest.mark.parametrize(
    ("spec", "devices", "adapted", "used"),
    [
        ("pipeline:1f1b", 1, "pipeline:schedule=1f1b", 1),
        ("pipeline:1f1b", 7, "pipeline:schedule=1f1b", 5),
        ("pipeline:interleaved", 3, "pipeline:schedule=interleaved,slices=2", 2),
        ("ring", 4, "ring:sync,slices=1", 4),
        ("ring:async", 6, "ring:async,slices=1", 5),
        ("hybrid:replicas=2", 3, "hybrid:replicas=1,schedule=1f1b", 3),
        ("hybrid:replicas=2", 4, "hybrid:replicas=2,schedule=1f1b", 4),
        ("hybrid:replicas=4", 6, "hybrid:replicas=3,schedule=1f1b", 6),
        ("hybrid:replicas=2", 7, "hybrid:replicas=2,schedule=1f1b", 6),
        ("ps:servers=3", 3, "ps:mode=bsp,servers=2", 3),
        ("ps:ssp", 2, "ps:mode=ssp,servers=1,staleness=3", 2),
    ],
)
def test_a_strategy_uses_as_many_devices_as_it_can(spec: str, devices: int, adapted: str, used: int) -> None:
    strategy, plan = plan_for_devices(parse(spec), devices, 8, BLOCKS)
    assert strategy.spec == adapted
    assert plan.size == devices
    busy = {rank for ranks in plan.holders for rank in ranks} | set(plan.servers)
    assert busy == set(range(used))
    assert not any(plan.ranks[used:])
    assert not check(plan)


def test_too_few_devices_are_refused() -> None:
    with pytest.raises(FailedPrecondition, match=r"ps:mode=asp,servers=2 cannot go on with 1 of its devices: .*take 2"):
        plan_for_devices(parse("ps:asp,servers=2"), 1, 8, BLOCKS)
