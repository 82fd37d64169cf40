"""The ledger and its audit: correct runs pass, and every violation is located."""

from __future__ import annotations

import hashlib
import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hoop.data.sampler import SampleOrder, shard
from hoop.engine.fault_tolerance.checkpoint_format import deserialize, serialize
from hoop.engine.stage.provenance import Provenance, mark, sample_fingerprint
from hoop.errors import FailedPrecondition, NotFound, ResourceExhausted
from hoop.files import write_bytes
from hoop.runs.audit import audit
from hoop.runs.checkpoint_store import FOLDER, name_of
from hoop.runs.ledger import NAME, Ledger, lines

RUN_SETTINGS: dict[str, Any] = {"seed": 3, "samples": 21, "batch_size": 8, "micros": 4, "data": "d"}
ORDER, STEPS_PER_EPOCH = SampleOrder(3, 21), 3
Entry = dict[str, Any]


def step_entry(step: int, by: list[int] | None = None) -> Entry:
    """Return the entry of an undisturbed step."""
    samples = ORDER.indices(*divmod(step - 1, STEPS_PER_EPOCH), 8)
    fingerprints = [sample_fingerprint(shard(samples, one, 4)) for one in range(4)]
    return {"step": step, "by": by or [1, 1, 2, 2], "fed": "".join(f"{one:06x}" for one in fingerprints)}


def begin_entry(step: int = 0, **changes: object) -> Entry:
    return {"begin": step, **RUN_SETTINGS, **changes}


def write_run(out: Path, entries: list[Entry], *checkpoints: int) -> Path:
    """Write a run folder with these entries, and with checkpoints of these steps."""
    ledger = Ledger(out / NAME)
    for entry in entries:
        ledger.append([entry])
        if entry.get("step") in checkpoints:
            add_checkpoint(out, entry["step"], ledger.hash_at(entry["step"]))
    ledger.close()
    return out


def add_checkpoint(out: Path, step: int, ledger_hash: str | None) -> None:
    data = serialize({"w": torch.ones(3)}, {"steps": step, "ledger": ledger_hash})
    write_bytes(out / FOLDER / name_of(step), data)


def forge(path: Path, entries: list[Entry]) -> None:
    """Write any entries, with valid hashes."""
    last, written = "", b""
    for entry in entries:
        body = json.dumps(entry).encode()[:-1]
        last = hashlib.sha256(last.encode() + body).hexdigest()[:32]
        written += body + f',"hash":"{last}"}}\n'.encode()
    path.write_bytes(written)


UNDISTURBED = [begin_entry(), *(step_entry(step) for step in range(1, 8))]


def test_an_undisturbed_run_passes_the_audit(tmp_path: Path) -> None:
    found = audit(write_run(tmp_path, UNDISTURBED, 3, 6))
    assert found.violation is None
    assert (found.steps, found.epochs, found.samples) == (7, 2, 21)
    assert found.shards == {1: 14, 2: 14}
    assert found.checkpoints == [name_of(6), name_of(3)]


def test_a_run_that_was_resumed_and_lost_a_device_passes_the_audit(tmp_path: Path) -> None:
    resumed = [begin_entry(), *(step_entry(step) for step in range(1, 6)), begin_entry(4), step_entry(5)]
    recovery: list[Entry] = [
        {"lost": 2},
        {"recovered": 6, "missing": [2, 3]},
        step_entry(6, [1, 1, 1, 3]),
        step_entry(7, [1, 1, 3, 3]),
    ]
    found = audit(write_run(tmp_path, resumed + recovery, 7))
    assert found.violation is None
    assert (found.resumed, found.repeated) == ([4], 1)
    assert found.taken_over == [{"step": 6, "lost": [2], "by": {"2": 1, "3": 3}}]


def test_a_device_that_came_back_may_compute_a_shard_of_a_later_recovery(tmp_path: Path) -> None:
    """Its loss may be reported after the recovery from it, and counts no more when it has a rank again."""
    entries: list[Entry] = [
        begin_entry(),
        step_entry(1),
        *({"assigned": [1, 3]}, {"recovered": 2, "missing": [2, 3]}, {"lost": 2}),
        *(step_entry(2, [1, 1, 3, 3]), {"assigned": [1, 3, 2]}, step_entry(3, [1, 2, 3, 3])),
        *({"lost": 3}, {"assigned": [1, 2]}, {"recovered": 4, "missing": [2, 3]}, step_entry(4, [1, 2, 2, 1])),
    ]
    found = audit(write_run(tmp_path, entries))
    assert found.violation is None
    assert found.taken_over[1] == {"step": 4, "lost": [3], "by": {"2": 2, "3": 1}}
    entries[-1] = step_entry(4, [1, 2, 3, 1])
    assert "it is device 3's, which was lost" in (audit(write_run(tmp_path, entries)).violation or "")


# ---- violations


def dropped(text: list[bytes]) -> list[bytes]:
    return text[:3] + text[4:]


def repeated(text: list[bytes]) -> list[bytes]:
    return text[:4] + text[3:]


def swapped(text: list[bytes]) -> list[bytes]:
    return [*text[:3], text[4], text[3], *text[5:]]


def edited(text: list[bytes]) -> list[bytes]:
    return [*text[:3], text[3].replace(b"[1,1,2,2]", b"[1,2,2,2]"), *text[4:]]


@pytest.mark.parametrize(
    ("tamper", "named"),
    [
        (dropped, "line 4: the chain is broken: step 4 does not follow step 2"),
        (repeated, "line 5: the chain is broken: step 3 does not follow step 3"),
        (swapped, "line 4: the chain is broken: step 4 does not follow step 2"),
        (edited, "line 4: the chain is broken: step 3 does not follow step 2"),
        (lambda text: [*text[:2], b"noise\n", *text[2:]], "line 3: damaged: no hash at its end"),
        (lambda text: text[:-3], "step-00000006.safetensors: it is of step 6 and names the hash"),
        (lambda text: [], "empty"),
    ],
    ids=["dropped", "repeated", "swapped", "edited", "noise", "cut off", "emptied"],
)
def test_a_tampered_line_is_located(tmp_path: Path, tamper: Callable[[list[bytes]], list[bytes]], named: str) -> None:
    path = write_run(tmp_path, UNDISTURBED, 3, 6) / NAME
    path.write_bytes(b"".join(tamper(path.read_bytes().splitlines(keepends=True))))
    violation = audit(tmp_path).violation or ""
    assert violation.startswith(str(tmp_path))
    assert named in violation


WRONG = step_entry(2)["fed"]
HISTORIES = {
    "step 2, shard 1: its 2 samples went in 0 times": [begin_entry(), step_entry(1), step_entry(2, [1, 0, 2, 2])],
    "step 2, shard 3: its 2 samples went in 2 times": [begin_entry(), step_entry(1), step_entry(2, [1, 1, 2, -2])],
    "step 1, shard 0: device 1 fed other samples than the order has": [begin_entry(), {**step_entry(1), "fed": WRONG}],
    "step 3 follows step 1": [begin_entry(), step_entry(1), step_entry(3)],
    "step 1 follows step 1": [begin_entry(), step_entry(1), step_entry(1)],
    "step 1: 3 shards, where a batch has 4": [begin_entry(), step_entry(1, [1, 1, 2])],
    "step 1: no device reported": [begin_entry(), {**step_entry(1), "by": []}],
    "the record begins at step 3": [begin_entry(3), step_entry(4)],
    "goes on after step 5, and step 2 is the last": [begin_entry(), step_entry(1), step_entry(2), begin_entry(5)],
    "after step 1 batch_size is 4 and was 8": [begin_entry(), step_entry(1), begin_entry(1, batch_size=4)],
    "shard 2: it is device 2's, which was lost": [
        *(begin_entry(), step_entry(1), {"lost": 2}, {"recovered": 2, "missing": [2, 3]}, step_entry(2)),
    ],
    "'wish' is unknown": [begin_entry(), {"wish": 1}],
    "not a ledger": [begin_entry(), {"step": 1}],
}


@pytest.mark.parametrize("named", HISTORIES)
def test_an_invalid_history_is_reported(tmp_path: Path, named: str) -> None:
    assert named in (audit(write_run(tmp_path, HISTORIES[named])).violation or "")


def test_an_epoch_is_counted_sample_by_sample(tmp_path: Path) -> None:
    """The last step of an epoch is shorter; with fewer samples than shards, some shards are empty."""
    run_settings = {"samples": 9, "batch_size": 7, "micros": 4}
    entries = [begin_entry(**run_settings)]
    for step in (1, 2):
        samples = SampleOrder(3, 9).indices(0, step - 1, 7)
        parts = [shard(samples, one, 4) for one in range(4)]
        by = [int(len(part) > 0) for part in parts]
        fingerprints = "".join(f"{sample_fingerprint(part) if len(part) else 0:06x}" for part in parts)
        entries.append({"step": step, "by": by, "fed": fingerprints})
    assert audit(write_run(tmp_path / "a", entries)).violation is None
    entries[-1]["by"] = [1, 1, 1, 1]
    assert "it has no samples, and device 1 fed some" in (audit(write_run(tmp_path / "b", entries)).violation or "")


@pytest.mark.parametrize("how", ["flipped", "of another step", "of another run"])
def test_a_checkpoint_that_does_not_match_the_ledger_is_reported(tmp_path: Path, how: str) -> None:
    path = write_run(tmp_path, UNDISTURBED, 6) / FOLDER / name_of(6)
    if how == "flipped":
        data = bytearray(path.read_bytes())
        data[-1] ^= 4
        path.write_bytes(data)
    else:
        ledger_hash = deserialize(path.read_bytes())[1]["ledger"]
        path.unlink()
        add_checkpoint(tmp_path, 5, ledger_hash) if how == "of another step" else add_checkpoint(tmp_path, 6, "0" * 32)
    expected = {
        "flipped": f"{path}: damaged or tampered with",
        "of another step": "it is of step 5 and names the hash",
        "of another run": "which is of no step of the ledger",
    }
    assert expected[how] in (audit(tmp_path).violation or "")


def test_a_folder_without_a_ledger_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"is .* a run's folder"):
        audit(tmp_path)


# ---- appending


def test_a_run_resumes_at_its_checkpoint_and_a_torn_line_is_removed(tmp_path: Path) -> None:
    path = write_run(tmp_path, UNDISTURBED) / NAME
    hashes = [line.hash for line in lines(path)]
    with path.open("ab") as file:
        file.write(b'{"step":8,"by":[1')
    for resumed in ({"steps": 5, "ledger": hashes[6]}, {"steps": 6, "ledger": "0" * 32}):
        with pytest.raises(FailedPrecondition, match=f"step {resumed['steps']} does not have the hash"):
            Ledger(path, resumed)
    ledger = Ledger(path, {"steps": 6, "ledger": hashes[6]})
    ledger.append([begin_entry(6), step_entry(7), step_entry(8)])
    ledger.close()
    found = audit(tmp_path)
    assert (found.violation, found.steps, found.repeated) == (None, 8, 1)


def test_entries_that_a_full_disk_refuses_are_written_later(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / NAME)
    ledger.append(UNDISTURBED[:3])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / NAME).stat().st_size + 50, limits[1]))
    try:
        with pytest.raises(ResourceExhausted, match="cannot write"):
            ledger.append(UNDISTURBED[3:5])
        with pytest.raises(ResourceExhausted, match="the ledger comes first"):
            ledger.sync()
        assert len(list(lines(tmp_path / NAME))) == 3
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    ledger.append(UNDISTURBED[5:])
    ledger.close()
    assert audit(tmp_path).steps == 7


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_bytes_pass_the_audit_or_are_reported(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "fuzzed"
    folder.mkdir(exist_ok=True)
    forge(folder / NAME, UNDISTURBED)
    valid = (folder / NAME).read_bytes()
    low, high = data.draw(st.integers(0, len(valid))), data.draw(st.integers(0, len(valid)))
    entry = st.dictionaries(
        st.sampled_from(["begin", "step", "by", "fed", "lost", "assigned", "recovered", "missing", *RUN_SETTINGS]),
        st.none() | st.integers(-3, 9) | st.lists(st.integers(-3, 9)) | st.text(max_size=3) | st.floats(),
    )
    if data.draw(st.booleans()):
        changed = valid[:low] + data.draw(st.binary(max_size=80)) + valid[high:]
        (folder / NAME).write_bytes(changed)
        violation = audit(folder).violation
        # A torn last line counts as never written.
        assert violation is None or violation.startswith(f"{folder / NAME}")
        if violation is None:
            assert valid.startswith(changed[: changed.rfind(b"\n") + 1])
    else:
        forge(folder / NAME, [begin_entry(), step_entry(1), data.draw(entry), step_entry(2)])
        violation = audit(folder).violation
        assert violation is None or violation.startswith(f"{folder / NAME}")


# ---- provenance in the summed gradient


def test_a_sum_of_shards_shows_which_devices_contributed_and_how_often() -> None:
    slots = torch.zeros(5, 8).numpy()
    mark(slots[0], 0, 7, 0xABCDEF)
    mark(slots[1], 1, 8, 0x000001)
    mark(slots[2], 1, 9, 0x000002)
    mark(slots[3], 3, 65535, 0xFFFFFF)
    provenance = Provenance(4)
    provenance.record(11, slots.sum(axis=0))
    assert provenance.as_events(10, 2) == [None, ([7, -2, 0, 65535], "abcdef000003000000ffffff")]
    provenance.record(11, slots[4])  # the step was repeated
    assert provenance.as_events(11, 1) == [([0, 0, 0, 0], "0" * 24)]
    for slot in slots:
        provenance.record(12, slot, more=True)
    (event,) = provenance.as_events(12, 1)
    assert event is not None
    assert event[0] == [7, -2, 0, 65535]
    provenance.forget(12)
    assert json.dumps(provenance.as_events(11, 2)) == json.dumps([([0, 0, 0, 0], "0" * 24), None])
