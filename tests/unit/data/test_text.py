"""TextData: text split into windows of characters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hoop.data import TextData, load
from hoop.errors import FailedPrecondition, InvalidArgument, NotFound


def text_of(dataset: Any) -> TextData:
    assert isinstance(dataset, TextData)
    return dataset


def test_windows_overlap_by_one_and_cover_the_text(data_dir: Path) -> None:
    words = "the quick brown fox jumps over the lazy dog; " * 4
    (data_dir / "fox.txt").write_text(words)
    train, test = (text_of(split) for split in load("text", path="fox.txt", context=8, test_fraction=0.25))
    assert (len(train), len(test)) == (16, 5)  # (135 - 1) // 8 and (45 - 1) // 8
    inputs, targets = train.batch(np.arange(16), epoch=0, seed=0)
    assert train.decode(inputs.flatten()) == words[: 16 * 8]
    assert train.decode(targets.flatten()) == words[1 : 16 * 8 + 1]
    assert test.decode(test.batch(np.array([0]), epoch=0, seed=0)[0][0]) == words[135:143]
    assert train.vocabulary == test.vocabulary == "".join(sorted(set(words)))
    assert torch.equal(train.encode(words[:8]), inputs[0])


def test_a_vocabulary_of_more_than_256_characters(data_dir: Path) -> None:
    words = "".join(chr(0x4E00 + number) for number in range(300)) * 2 + "\r\n\N{GRINNING FACE}"
    (data_dir / "many.txt").write_bytes(words.encode())
    train, _ = load("text", path="many.txt", context=20)
    assert text_of(train).classes == 303
    inputs, _ = train.batch(np.arange(len(train)), epoch=0, seed=0)
    assert text_of(train).decode(inputs.flatten()) == words[: inputs.numel()]


@pytest.mark.usefixtures("real_datasets")
def test_the_real_shakespeare() -> None:
    try:
        train, test = load("tinyshakespeare", context=64)
    except NotFound as error:
        pytest.skip(str(error))
    assert text_of(train).classes == 65
    assert (len(train), len(test)) == ((1_003_855 - 1) // 64, (111_539 - 1) // 64)
    assert text_of(train).decode(train.batch(np.array([0]), epoch=0, seed=0)[0][0]).startswith("First Citizen:")


def test_another_text_is_not_loaded_as_shakespeare(data_dir: Path) -> None:
    path = data_dir / "tinyshakespeare.txt"
    path.write_text("To be")
    with pytest.raises(FailedPrecondition, match=f"{path} is damaged.*sha256 expected 86c4e6aa.*, found"):
        load("tinyshakespeare")


def test_missing_text_says_what_to_do(data_dir: Path) -> None:
    with pytest.raises(NotFound, match=f"dataset tinyshakespeare is not in {data_dir}, .*download=True"):
        load("tinyshakespeare")
    with pytest.raises(NotFound, match=f"there is no file novel.txt in .*{data_dir}"):
        load("text", path="novel.txt")


def test_invalid_text_and_options_are_rejected(data_dir: Path) -> None:
    (data_dir / "short.txt").write_text("abc")
    (data_dir / "latin.txt").write_bytes(b"caf\xe9" * 100)
    with pytest.raises(InvalidArgument, match="context: short/train has 3 characters, too few for 128"):
        load("text", path="short.txt")
    with pytest.raises(InvalidArgument, match=r"latin\.txt is not UTF-8"):
        load("text", path="latin.txt")
    with pytest.raises(InvalidArgument, match=r"test_fraction: 1\.5"):
        load("text", path="short.txt", test_fraction=1.5)
    with pytest.raises(InvalidArgument, match="context: 0 is not at least 1"):
        load("text", path="short.txt", context=0)
    with pytest.raises(InvalidArgument, match="text: 'xyz' does not occur"):
        TextData("abc", np.array([0, 1, 2]), "abc", context=1).encode("zyx")
