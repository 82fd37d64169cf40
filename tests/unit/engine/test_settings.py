"""Settings are bounded at both ends: a value that would use up a machine is refused, with the bound."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hoop.engine.settings import Settings
from hoop.errors import InvalidArgument
from hoop.strategies.base import MAX_MICROBATCHES
from hoop.strategies.catalog import parse


def checked(**changes: Any) -> Settings:
    return Settings().replaced(changes).check()


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("epochs", 10**9),
        ("batch_size", 1 << 24),
        ("shards", MAX_MICROBATCHES),
        ("accumulate", MAX_MICROBATCHES // 8),
        ("seed", 2**64 - 1),
        ("threads_per_device", 1024),
        ("replicas", 1024),
        ("evaluate_every", 10**9),
        ("checkpoint_every", 10**9),
        ("keep", 10**6),
        ("max_steps", 10**12),
        ("trace_steps", 100_000),
        ("bucket_bytes", 1 << 40),
        ("warmup", 10**12),
        ("step_every", 10**12),
        ("step_factor", 1000.0),
        ("timeout_s", 86400.0),
        ("host_replica_s", 86400.0),
    ],
)
def test_a_setting_above_its_upper_end_is_refused_with_the_bound(name: str, most: float) -> None:
    assert getattr(checked(**{name: most}), name, most) == most
    bound = MAX_MICROBATCHES if name == "accumulate" else int(most)
    for value in (most + 1, 10**300 if isinstance(most, int) else 1e300):
        if value != most:
            with pytest.raises(InvalidArgument, match=rf"^{name}: .*{bound}"):
                checked(**{name: value})


@pytest.mark.parametrize(
    ("name", "least"), [("epochs", 0), ("batch_size", 1), ("shards", 1), ("threads_per_device", 1), ("keep", 1)]
)
def test_a_setting_below_its_lower_end_is_refused(name: str, least: int) -> None:
    with pytest.raises(InvalidArgument, match=rf"^{name}: {least - 1} is not a whole number of at least {least}$"):
        checked(**{name: least - 1})


def test_replicas_are_at_least_1_and_not_with_replication_off() -> None:
    with pytest.raises(InvalidArgument, match=r"^replicas: 0 is not a whole number of at least 1; --no-replicate"):
        checked(replicas=0)
    with pytest.raises(InvalidArgument, match=r"^replicas: 2, and --no-replicate"):
        checked(replicas=2, replicate=False)
    assert (checked().replicas, checked(replicas=3).replicas) == (1, 3)


def test_every_whole_number_has_bounds() -> None:
    """A new setting must get bounds too."""
    numbers = [name for name, value in vars(Settings()).items() if type(value) is int]
    for name in numbers:
        with pytest.raises(InvalidArgument, match=name):
            checked(**{name: 10**30})


def test_shards_and_accumulate_are_bounded_together() -> None:
    checked(shards=MAX_MICROBATCHES // 4, accumulate=4)
    with pytest.raises(InvalidArgument, match=rf"^accumulate: .* more than {MAX_MICROBATCHES}"):
        checked(shards=MAX_MICROBATCHES // 4, accumulate=5)


@pytest.mark.parametrize("factor", [math.nan, math.inf, 1e300, 0.5, -1.0])
def test_slowdown_is_a_finite_factor(factor: float) -> None:
    with pytest.raises(InvalidArgument, match=r"^slowdown: "):
        checked(slowdown=[1.0, factor])


@pytest.mark.parametrize("name", ["lr", "clip", "timeout_s", "step_factor"])
def test_a_number_that_no_float_can_hold_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{name}: .* is not a number$"):
        checked(**{name: 10**400})


def test_a_rate_that_overflows_is_infinite() -> None:
    optimizer = checked(schedule="step", step_every=1, step_factor=1000.0).optimizer
    assert optimizer.rate(3, 10) == pytest.approx(1e6)
    assert optimizer.rate(5000, 10_000) == math.inf


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("pipeline:interleaved,slices=999999999", "slices: 999999999; a device holds at most 1024"),
        ("ring:slices=999999999", "slices: 999999999; a device holds at most 1024"),
        ("hybrid:replicas=999999999", "replicas: 999999999 are more than the 4096"),
        ("ps:servers=999999999", "servers: 999999999 are more than the 4096"),
    ],
)
def test_numbers_of_a_strategy_are_bounded(text: str, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        parse(text)


@pytest.mark.parametrize(
    ("text", "devices", "num_microbatches", "says"),
    [
        ("data", 4097, 8, "devices: 4097"),
        ("data", 4, 10**8, f"num_microbatches: 100000000; a global batch has at most {MAX_MICROBATCHES}"),
        ("pipeline:interleaved,slices=1024", 4, MAX_MICROBATCHES, "in 4096 stages; the product is at most 262144"),
        ("hybrid:replicas=2,schedule=interleaved,slices=1024", 4, MAX_MICROBATCHES, "in 2048 stages"),
        ("ring:slices=1024", 4, MAX_MICROBATCHES, "in 4096 stages"),
        ("ps:servers=1", 4, 10**8, "num_microbatches: 100000000"),
    ],
)
def test_a_plan_that_is_too_large_is_refused_before_it_is_made(
    text: str, devices: int, num_microbatches: int, says: str
) -> None:
    with pytest.raises(InvalidArgument, match=says):
        parse(text).plan(devices, num_microbatches)


def test_faults_are_a_text_or_a_list_of_texts() -> None:
    faults = ["kill@rank=1,step=7", "kill@rank=2,step=9"]
    assert checked(faults=faults).parsed_faults == checked(faults="; ".join(faults)).parsed_faults
    assert checked(faults=[]).parsed_faults == ()
    with pytest.raises(InvalidArgument, match=r"faults: \[1\] is neither text, such as 'kill@rank=1,step=7', nor a li"):
        checked(faults=[1])
