"""The same bits: whatever the number of devices, the strategy, the shares, and wherever a run was interrupted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DRIVER = Path(__file__).with_name("train_driver.py")
PATIENCE_S = 110.0
JOB: dict[str, Any] = {
    "devices": 2,
    "epochs": 2,
    "batch_size": 32,
    "shards": 4,
    "lr": 0.01,
    "schedule": "cosine",
}

SAME: dict[str, dict[str, Any]] = {
    "one device": {"devices": 1},
    "two": {},
    "three": {"devices": 3},
    "more devices than shards": {"devices": 5},
    "ring": {"strategy": "ring"},
    "gpipe": {"strategy": "pipeline:gpipe", "devices": 4},
    "1f1b": {"strategy": "pipeline:1f1b", "devices": 3},
    "interleaved": {"strategy": "pipeline:interleaved"},
    "zero-bubble": {"strategy": "pipeline:zero-bubble", "devices": 3},
    "hybrid": {"strategy": "hybrid:replicas=2", "devices": 4},
    "no balance": {"balance": False, "pin": False},
}
OTHERS: dict[str, dict[str, Any]] = {
    "a batch of all, in one shard": {"batch_size": 500, "shards": 1},
    "clipped and accumulated": {"model": "whole", "clip": 0.01, "accumulate": 3},
    "fewer samples than shards": {"model": "whole", "batch_size": 5, "shards": 8, "max_steps": 9},
    "plain": {"model": "plain"},
    "recomputed": {"model": "plain", "recompute": True},
}


def train(jobs: list[dict[str, Any]], environment: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Each job's result, in order."""
    done = subprocess.run(
        [sys.executable, str(DRIVER)],
        input=json.dumps([{**JOB, **job} for job in jobs]),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, **(environment or {})},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(jobs), done.stderr
    return found


def test_every_synchronous_strategy_and_number_of_devices_gives_the_same_bits() -> None:
    found = dict(zip(SAME, train(list(SAME.values())), strict=True))
    assert {name: one.get("text") for name, one in found.items() if "error" in one} == {}
    expected = found["one device"]
    assert expected["steps"] == 2 * 7  # the last of an epoch is shorter
    assert expected["epochs"] == 2
    for name, one in found.items():
        for field in ("weights_sha256", "loss", "accuracy", "steps", "epochs"):
            assert one[field] == expected[field], f"{name}: {field}"
        assert one["same_module"], name
        assert one["right"] == pytest.approx(one["accuracy"]), f"{name}: the module has other weights"
        assert (one["bytes_sent"] > 0) == (one["devices"] > 1), name


def test_odd_settings_on_one_device_and_on_three() -> None:
    jobs = [{**job, "devices": devices} for job in OTHERS.values() for devices in (1, 3)]
    found = train(jobs)
    assert [one["text"] for one in found if "error" in one] == []
    pairs = dict(zip(OTHERS, zip(found[::2], found[1::2], strict=True), strict=True))
    for name, (one, three) in pairs.items():
        assert one["weights_sha256"] == three["weights_sha256"], name
    checksums = {name: one["weights_sha256"] for name, (one, _) in pairs.items()}
    assert checksums.pop("recomputed") == checksums["plain"]
    assert len(set(checksums.values())) == len(checksums), checksums  # they are settings, not decoration


def test_a_loss_of_the_users_own_means_what_it_says() -> None:
    """As ``hoop.train`` is given it: a mean as the loss of that name, a sum as the mean at a rate times the batch."""
    plain: dict[str, Any] = {
        "model": "plain",
        "optimizer": "sgd",
        "schedule": "constant",
        "lr": 0.1,
        "batch_size": 29,
    }  # 203 is 7 times 29
    told: list[dict[str, Any]] = [{"loss": "mean"}, {"loss": "none"}, {"loss": "sum", "lr": 0.1 / 29}]
    jobs = [{**plain, **one, "devices": devices} for one in [{}, *told] for devices in (1, 3)]
    found = train(jobs)
    assert [one["text"] for one in found if "error" in one] == []
    for one, three in zip(found[::2], found[1::2], strict=True):
        assert one["weights_sha256"] == three["weights_sha256"]
    named, mean, none, total = found[::2]
    assert mean["loss"] == pytest.approx(named["loss"], rel=1e-4)
    assert none["loss"] == pytest.approx(named["loss"], rel=1e-4)
    assert total["loss"] == pytest.approx(50 * named["loss"], rel=1e-4)  # of all 50 test samples
    assert {one["accuracy"] for one in found} == {named["accuracy"]}


def test_a_loss_that_shards_do_not_add_up_to_is_refused() -> None:
    weighted, number, stated = train(
        [
            {"loss": "weighted"},
            {"loss": "a number"},
            {"loss": "a number", "reduction": "mean"},  # on the devices, where it is called first
        ]
    )
    for one, text in (
        (weighted, "has class weights"),
        (number, "returned float"),
        (stated, "returned float"),
    ):
        assert one["error"] == "InvalidArgument"
        assert text in one["text"]


def test_without_test_data_nothing_is_called_a_test(tmp_path: Path) -> None:
    alone, tested = train([{"untested": True, "out": str(tmp_path / "a")}, {"out": str(tmp_path / "b")}])
    assert (alone["split"], tested["split"]) == ("train", "test")
    assert alone["repr"].startswith("<training accuracy ")
    assert tested["repr"].startswith("<accuracy ")
    assert alone["weights_sha256"] == tested["weights_sha256"]
    for name in ("metrics.jsonl", "result.json", "curve.svg"):
        assert ">test<" not in (tmp_path / "a" / name).read_text()
        assert "test_accuracy" not in (tmp_path / "a" / name).read_text()
    assert '"train_accuracy"' in (tmp_path / "a" / "metrics.jsonl").read_text()
    assert '"test_accuracy"' in (tmp_path / "b" / "metrics.jsonl").read_text()
    assert json.loads((tmp_path / "a" / "result.json").read_text())["split"] == "train"


def test_a_run_goes_on_to_the_bit_also_with_other_devices_and_strategies(tmp_path: Path) -> None:
    at = [tmp_path / name for name in ("a", "b", "c", "d")]
    first = [{"out": str(one), "max_steps": steps} for one, steps in zip(at, (7, 9, 1, 14), strict=True)]
    second = [
        {"out": str(at[0]), "resume": True},
        {"out": str(at[1]), "resume": True, "devices": 3},
        {"out": str(at[2]), "resume": True, "devices": 3, "strategy": "pipeline:1f1b"},
        {"out": str(at[3]), "resume": True},  # there is nothing left to do
    ]
    straight, *found = train([{}, *first, *second])
    assert [one["text"] for one in found if "error" in one] == []
    assert [one["steps"] for one in found[:4]] == [7, 9, 1, 14]
    for one in found[4:]:
        for field in ("weights_sha256", "loss", "accuracy", "steps"):
            assert one[field] == straight[field], field
    for folder in at:
        steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert sorted(set(steps)) == list(range(1, 15))
        newest = sorted((folder / "checkpoints").iterdir())[-1]
        assert newest.name == "step-00000014.safetensors"


def test_a_loss_that_is_no_number_stops_the_run_and_is_not_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    job = {
        "model": "whole",
        "optimizer": "sgd",
        "lr": 1e30,
        "out": str(out),
        "epochs": 1000,
        "schedule": "constant",
    }
    (found,) = train([job])
    assert found["error"] == "FailedPrecondition"
    assert "at step" in found["text"]
    assert "lower --lr than 1e+30" in found["text"]
    assert list(out.glob("checkpoints/*")) == []
