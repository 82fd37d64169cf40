"""Parsing of clusters, links and costs, and the errors for invalid ones."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import math
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hoop.errors import HoopError, InvalidArgument, NotFound
from hoop.runs.simulation_report import sizes
from hoop.simulate import cost_model
from hoop.simulate.cluster import Cluster, Host, Link, parse_bandwidth, read_cluster
from hoop.simulate.cost_model import BlockCost, Costs, LinearCost, Machine, read_costs
from hoop.simulate.simulation import simulate
from hoop.strategies.catalog import parse

ROOT = Path(__file__).resolve().parents[3]


def test_bandwidth_is_given_in_bits_or_bytes() -> None:
    assert Link.parse("1Gbps,0.5ms") == Link(1.25e8, 5e-4)
    assert parse_bandwidth("100 Mbps") == 1.25e7
    assert parse_bandwidth("125MB/s") == parse_bandwidth("125MB") == 1.25e8
    assert Link.parse("10Gbps").latency == 0


@pytest.mark.parametrize("text", ["fast", "0Gbps", "-1Gbps", "1Gbps,soon", "", "infGbps"])
def test_an_invalid_link_is_rejected(text: str) -> None:
    with pytest.raises(InvalidArgument, match="link"):
        Link.parse(text, "link")


@pytest.mark.parametrize("text", ["foo", "12XB,1ms", "fastGbps"])
def test_the_error_of_a_link_shows_a_bandwidth(text: str) -> None:
    """It advised to write a size, 256MiB."""
    with pytest.raises(InvalidArgument, match=r"^--link: '.*' is no bandwidth; write e\.g\. 1Gbps, 125MB/s$"):
        Link.parse(text, "--link")


def test_ranks_are_assigned_host_by_host() -> None:
    cluster = Cluster((Host(2, speed=2.0, memory=10), Host(3, cores=2, speeds=(1.0, 0.5, 1.0))))
    assert cluster.host_of == [0, 0, 1, 1, 1]
    assert cluster.speeds == [2.0, 2.0, 1.0, 0.5, 1.0]
    assert cluster.memory == [10, 10, None, None, None]
    assert cluster.first(3).hosts == (Host(2, speed=2.0, memory=10), Host(1, cores=2, speeds=(1.0,)))
    assert [host.devices for host in Cluster.even(7, 3).hosts] == [3, 3, 1]


def test_the_example_cluster_is_valid() -> None:
    cluster = read_cluster(ROOT / "examples" / "cluster.toml")
    assert (cluster.size, len(cluster.hosts), cluster.link) == (18, 5, Link(1.25e9, 5e-5))
    assert cluster.hosts[0].memory == 2 << 30


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[host]]\ndevices = 0", "host 0: devices: 0 is not a whole number in 1..4096"),
        ("[[host]]\ndevices = 1000000000", "host 0: devices: 1000000000 is not a whole number in 1..4096"),
        ("[link]\nbandwidth = '0'\n[[host]]", r"cluster\.toml: bandwidth: 0.0 is not above 0"),
        ("[[host]]\ndevices = 4096\ncount = 4096", r"cluster\.toml: devices: 16777216 are more than the 4096"),
        ("[[host]]\ncores = 1.5", "host 0: cores: 1.5 is not a whole number"),
        ("[[host]]\nspeed = 'fast'", "host 0: speed: 'fast' is not a number"),
        ("[[host]]\nspeed = inf", "host 0: speed: inf is not a number"),
        ("[[host]]\nspeeds = 1", "host 0: speeds: 1 is not a list"),
        ("[[host]]\nspeeds = [true]", "host 0: speed: True is not a number"),
        ("[[host]]\nspeeds = [1, 2]", "host 0: speeds: 2 values for 1 devices"),
        ("[[host]]\nmemory = [1]", "host 0: memory: \\[1\\] is not a size"),
        (
            "[link]\nbandwidth = '1Gbps'\nlatency = [1]\n[[host]]",
            "link: latency: \\[1\\] is neither seconds nor a duration",
        ),
        ("[link]\nbandwidth = '1Gbps'\nshared = 'no'\n[[host]]", "link: shared: 'no' is neither true nor false"),
        ("host = [1]", "host 0: 1 is no table"),
        ("[[host]]\ndevcies = 2", "host 0: unknown devcies"),
        ("link = 3\n[[host]]\ndevices = 1", "link: 3 is no link"),
        ("link = '1Gbps'", "no \\[\\[host\\]\\]"),
        ("= 3", "not TOML"),
    ],
)
def test_invalid_cluster_files_are_rejected(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=message):
        read_cluster(path)
    with pytest.raises(NotFound, match=r"nowhere\.toml"):
        read_cluster(tmp_path / "nowhere.toml")


def test_costs_round_trip_through_a_file(tmp_path: Path) -> None:
    block = BlockCost(
        "b", LinearCost(1.0, 0.5), LinearCost(2.0, 1.5), 10, 20, 12, LinearCost(0, 4.0), LinearCost(0, 8.0)
    )
    machine = Machine(1, 2, 3, 4, 5, 6, 1.5, 7, copy_at=((1, 2), (4, 8)))
    costs = Costs((block, block), 16, machine, LinearCost(0, 1), LinearCost(2), 7.0, joint=4, source="s")
    path = tmp_path / "costs.json"
    path.write_text(costs.to_json())
    assert read_costs(path) == costs
    path.write_text(costs.to_json().replace('"joint"', '"joined"'))
    with pytest.raises(InvalidArgument, match="joined"):
        read_costs(path)
    path.write_text(costs.to_json().replace('"agree_s"', '"agreed_s"'))
    with pytest.raises(InvalidArgument, match="no agreed_s"):
        read_costs(path)
    path.write_text('{"format": 0}')
    with pytest.raises(InvalidArgument, match="hoop calibrate"):
        read_costs(path)


WRONG = [None, True, -1, 1.5, math.nan, math.inf, 10**400, "text", "", [], [1], [[1, 2, 3]], {}, {"fixed": "x"}]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in parsed JSON or TOML."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def with_value(value: Any, path: tuple[Any, ...], wrong: Any) -> Any:
    if not path:
        return wrong
    changed = copy.copy(value)
    changed[path[0]] = with_value(value[path[0]], path[1:], wrong)
    return changed


def test_a_wrong_value_anywhere_in_a_costs_file_is_refused_or_can_be_simulated() -> None:
    block = BlockCost("b", LinearCost(1.0, 0.5), LinearCost(2.0), 10, 20, 12, LinearCost(0, 4.0), LinearCost(0, 8.0))
    machine = Machine(copy_at=((1, 2), (4, 8)), byte_s=0.5)
    good = json.loads(Costs((block, block), 16, machine, about={"batch_size": 4, "shards": 2}).to_json())
    refusals = []
    for path, wrong in itertools.product(places(good), WRONG):
        try:
            costs = Costs.from_json(json.dumps(with_value(good, path, wrong)), "costs.json")
        except InvalidArgument as error:
            refusals.append(str(error))
            continue
        batch, shards = sizes(costs, None, None, 2)
        with contextlib.suppress(HoopError):
            simulate(parse("data"), costs.with_rows(-(-batch // shards)), Cluster.even(2), num_microbatches=shards)
    assert len(refusals) > 500
    assert all(text.startswith("costs.json: ") for text in refusals)


def test_a_wrong_value_anywhere_in_a_cluster_file_is_refused_or_can_be_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = {
        "link": {"bandwidth": "1Gbps", "latency": "1ms", "shared": True},
        "inside": "10Gbps,1us",
        "host": [{"devices": 2, "cores": 1, "speed": 2.0, "memory": "1GiB", "speeds": [1.0, 2.0], "count": 2}],
    }
    path, refusals = tmp_path / "cluster.toml", []
    path.touch()
    for place, wrong in itertools.product(places(good), WRONG):
        changed = with_value(good, place, wrong)
        monkeypatch.setattr(tomllib, "loads", lambda _, changed=changed: changed)
        try:
            cluster = read_cluster(path)
        except InvalidArgument as error:
            refusals.append(str(error))
            continue
        with contextlib.suppress(HoopError):
            simulate(parse("data"), Costs.uniform(1), cluster, num_microbatches=cluster.size)
    assert len(refusals) > 100
    assert all(text.startswith(f"{path}: ") for text in refusals)


def test_a_costs_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidArgument, match=r"costs\.json: no costs in JSON"):
        read_costs(tmp_path / "costs.json")


def test_the_cost_of_a_byte_depends_on_the_size() -> None:
    machine = Machine(copy_s=9.0, add_s=2.0, copy_at=((16, 1.0), (64, 3.0)))
    assert [machine.copy(size) for size in (8, 16, 32, 64, 128)] == [8, 16, 2 * 32, 3 * 64, 3 * 128]
    assert machine.copy(16, vector_size=64) == 3 * 16
    assert machine.add(10) == 20
    assert machine.message(64) == machine.message_s + 3 * 64
    assert Machine(message_s=1, byte_s=0.5).message(4) == 3


def test_a_linear_cost_is_fitted_through_points() -> None:
    assert LinearCost.through_points([(10, 3.0), (20, 4.0)]) == LinearCost(2.0, 0.1)
    assert LinearCost.through_points([(10, 3.0), (20, 2.0)]) == LinearCost(3.0, 0.0)  # noise: never negative
    assert LinearCost.through_points([(10, 1.0), (20, 4.0)]).fixed == 0.0


def test_costs_are_shipped_with_hoop() -> None:
    assert {"mnist", "lenet"} <= set(cost_model.shipped_recipes())
    for name in cost_model.shipped_recipes():
        costs = cost_model.shipped_costs(name)
        assert costs.blocks, name
        assert "shipped" in costs.source
    with pytest.raises(NotFound, match="hoop calibrate nothing"):
        cost_model.shipped_costs("nothing")
