"""Parsing of clusters, links and costs, and the errors for invalid ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from hoop.errors import InvalidArgument, NotFound
from hoop.simulate import cost_model
from hoop.simulate.cluster import Cluster, Host, Link, parse_bandwidth, read_cluster
from hoop.simulate.cost_model import BlockCost, Costs, LinearCost, Machine, read_costs

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
        ("[[host]]\ndevices = 0", "host 0: host: 0 devices"),
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
