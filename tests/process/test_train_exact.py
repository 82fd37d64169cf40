"""A training gives the same bits for every number of devices, strategy and balance, and after an interruption."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import preloaded
import pytest

DRIVER = Path(__file__).with_name("train_driver.py")
TIMEOUT_S = 400.0
JOB: dict[str, Any] = {
    "devices": 2,
    "memory": "16MiB",
    "epochs": 2,
    "batch_size": 32,
    "shards": 4,
    "lr": 0.01,
    "schedule": "cosine",
}

SAME_RESULT: dict[str, dict[str, Any]] = {
    "one device": {"devices": 1},
    "two": {},
    "three without balance": {"devices": 3, "balance": False, "pin": False},
    "more devices than shards": {"devices": 5},
    "ring": {"strategy": "ring"},
    "gpipe": {"strategy": "pipeline:gpipe", "devices": 4},
    "1f1b": {"strategy": "pipeline:1f1b", "devices": 3},
    "interleaved": {"strategy": "pipeline:interleaved"},
    "zero-bubble": {"strategy": "pipeline:zero-bubble", "devices": 3},
    "hybrid": {"strategy": "hybrid:replicas=2", "devices": 4},
}
UNUSUAL_SETTINGS: dict[str, dict[str, Any]] = {
    "a batch of all, in one shard": {"batch_size": 500, "shards": 1},
    "clipped and accumulated": {"model": "whole", "clip": 0.01, "accumulate": 3},
    "fewer samples than shards": {"model": "whole", "batch_size": 5, "shards": 8, "max_steps": 9},
    "plain": {"model": "plain"},
    "recomputed": {"model": "plain", "recompute": True},
}


def train(jobs: list[dict[str, Any]], environment: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """The result of each job, in order."""
    completed = preloaded.run(
        [sys.executable, str(DRIVER)],
        input=json.dumps([{**JOB, **job} for job in jobs]),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, **(environment or {})},
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    results = [json.loads(line) for line in completed.stdout.splitlines()]
    assert len(results) == len(jobs), completed.stderr
    return results


def test_every_synchronous_strategy_and_number_of_devices_gives_the_same_bits(tmp_path: Path) -> None:
    """One of them keeps its run in a folder."""
    jobs = {**SAME_RESULT, "two": {"out": str(tmp_path / "run")}}
    results = dict(zip(jobs, train(list(jobs.values())), strict=True))
    assert {name: result.get("text") for name, result in results.items() if "error" in result} == {}
    expected = results["one device"]
    assert expected["steps"] == 2 * 7  # the last batch of an epoch is smaller
    assert expected["epochs"] == 2
    for name, result in results.items():
        for field in ("weights_sha256", "loss", "accuracy", "steps", "epochs"):
            assert result[field] == expected[field], f"{name}: {field}"
        assert result["same_module"], name
        assert result["right"] == pytest.approx(result["accuracy"]), f"{name}: the module has other weights"
        assert (result["bytes_sent"] > 0) == (result["devices"] > 1), name


def test_unusual_settings_give_the_same_bits_on_one_device_and_on_three() -> None:
    jobs = [{**job, "devices": devices} for job in UNUSUAL_SETTINGS.values() for devices in (1, 3)]
    results = train(jobs)
    assert [result["text"] for result in results if "error" in result] == []
    pairs = dict(zip(UNUSUAL_SETTINGS, zip(results[::2], results[1::2], strict=True), strict=True))
    for name, (one, three) in pairs.items():
        assert one["weights_sha256"] == three["weights_sha256"], name
    checksums = {name: one["weights_sha256"] for name, (one, _) in pairs.items()}
    assert checksums.pop("recomputed") == checksums["plain"]
    assert len(set(checksums.values())) == len(checksums), checksums  # every setting has an effect


@pytest.mark.slow
def test_a_custom_loss_is_reduced_as_it_declares() -> None:
    """A loss with reduction mean or none trains like the built-in loss; so does sum at lr / batch size."""
    settings: dict[str, Any] = {
        "model": "plain",
        "optimizer": "sgd",
        "schedule": "constant",
        "lr": 0.1,
        "batch_size": 29,
    }  # 203 is 7 times 29
    custom: list[dict[str, Any]] = [{"loss": "mean"}, {"loss": "none"}, {"loss": "sum", "lr": 0.1 / 29}]
    jobs = [{**settings, **loss, "devices": devices} for loss in [{}, *custom] for devices in (1, 3)]
    results = train(jobs)
    assert [result["text"] for result in results if "error" in result] == []
    for one, three in zip(results[::2], results[1::2], strict=True):
        assert one["weights_sha256"] == three["weights_sha256"]
    built_in, mean, none, total = results[::2]
    assert mean["loss"] == pytest.approx(built_in["loss"], rel=1e-4)
    assert none["loss"] == pytest.approx(built_in["loss"], rel=1e-4)
    assert total["loss"] == pytest.approx(50 * built_in["loss"], rel=1e-4)  # the sum over 50 test samples
    assert {result["accuracy"] for result in results} == {built_in["accuracy"]}


def test_a_loss_whose_reduction_is_not_known_is_refused() -> None:
    doubled, number, stated, weighted = train(
        [
            {"loss": "doubled"},
            {"loss": "a number"},
            {"loss": "a number", "reduction": "mean"},
            {"loss": "weighted", "strategy": "pipeline"},
        ]
    )
    for result, text in (
        (doubled, "its last operation, Mul, does not say of what it is the mean or the sum; if it is the mean"),
        (number, "returned float"),
        (stated, "returned float"),
        (weighted, "strategy: pipeline"),
    ):
        assert result["error"] == "InvalidArgument"
        assert text in result["text"]


@pytest.mark.parametrize("loss", ["weighted", "weighted lambda"])
def test_class_weights_train_to_the_same_weights_on_any_devices(loss: str) -> None:
    jobs = [{"loss": loss, "optimizer": "sgd", "lr": 0.1, "shards": 4, "devices": devices} for devices in (1, 3)]
    one, three = train(jobs)
    assert [result["text"] for result in (one, three) if "error" in result] == []
    assert one["weights_sha256"] == three["weights_sha256"]


def test_without_test_data_metrics_are_named_train(tmp_path: Path) -> None:
    untested, tested = train([{"untested": True, "out": str(tmp_path / "a")}, {"out": str(tmp_path / "b")}])
    assert (untested["split"], tested["split"]) == ("train", "test")
    assert "training accuracy " in untested["repr"]
    assert ", accuracy " in tested["repr"]
    assert untested["weights_sha256"] == tested["weights_sha256"]
    for name in ("metrics.jsonl", "result.json", "trace.json"):
        assert ">test<" not in (tmp_path / "a" / name).read_text()
        assert "test_accuracy" not in (tmp_path / "a" / name).read_text()
    assert '"train_accuracy"' in (tmp_path / "a" / "metrics.jsonl").read_text()
    assert '"test_accuracy"' in (tmp_path / "b" / "metrics.jsonl").read_text()
    assert json.loads((tmp_path / "a" / "result.json").read_text())["split"] == "train"


def test_a_resumed_run_gives_the_same_bits_with_other_devices_and_strategies(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b", "c", "d")]
    first: list[dict[str, Any]] = [
        *({"out": str(folder), "max_steps": steps} for folder, steps in zip(folders[:3], (7, 9, 1), strict=True)),
        {"out": str(folders[3])},  # uninterrupted
    ]
    second = [
        {"out": str(folders[0]), "resume": True},
        {"out": str(folders[1]), "resume": True, "devices": 3},
        {"out": str(folders[2]), "resume": True, "devices": 3, "strategy": "pipeline:1f1b"},
        {"out": str(folders[3]), "resume": True},  # already complete
    ]
    results = train([*first, *second])
    assert [result["text"] for result in results if "error" in result] == []
    uninterrupted = results[3]
    assert [result["steps"] for result in results[:4]] == [7, 9, 1, 14]
    for result in results[4:]:
        for field in ("weights_sha256", "loss", "accuracy", "steps"):
            assert result[field] == uninterrupted[field], field
    for folder in folders:
        steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert sorted(set(steps)) == list(range(1, 15))
        newest = sorted((folder / "checkpoints").iterdir())[-1]
        assert newest.name == "step-00000014.safetensors"


def test_a_non_finite_loss_stops_the_run_without_a_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "out"
    job = {
        "model": "whole",
        "optimizer": "sgd",
        "lr": 1e30,
        "out": str(out),
        "epochs": 1000,
        "schedule": "constant",
    }
    (result,) = train([job])
    assert result["error"] == "FailedPrecondition"
    assert "at step" in result["text"]
    assert "lower --lr than 1e+30" in result["text"]
    assert list(out.glob("checkpoints/*")) == []
