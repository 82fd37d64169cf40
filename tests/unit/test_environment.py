"""Versions and arithmetic of devices: differences are named with their remedy."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest

import hoop
from hoop.environment import (
    describe,
    differing,
    mismatch,
    processor,
    rounding_text,
    rounds_differently,
    versions,
)

EXPECTED = {"hoop": "0.2.0", "torch": "2.13.0", "python": "3.11", "arithmetic": "aa"}


def test_the_versions_of_this_process() -> None:
    found = versions()
    assert found["hoop"] == hoop.__version__
    assert found["torch"].count(".") >= 2
    assert "+" not in found["torch"]
    assert found["python"] == f"{sys.version_info.major}.{sys.version_info.minor}"


def test_a_difference_that_may_change_the_result_is_named_with_its_remedy() -> None:
    text = mismatch({**EXPECTED, "torch": "2.15.0", "arithmetic": "bb"}, EXPECTED, same_bits=True)
    assert text.startswith("PyTorch 2.15.0, the result of the numeric probe bb, where the others have PyTorch 2.13.0, ")
    assert "install the same version of PyTorch on every machine" in text
    assert "use machines with the same type of processor" in text
    assert "--set allow_mixed=true" in text


def test_another_arithmetic_is_a_mismatch_only_if_the_bits_must_be_the_same() -> None:
    other = {**EXPECTED, "arithmetic": "bb", "processor": "Old CPU, x86_64, AVX2"}
    assert mismatch(other, EXPECTED) == ""
    assert rounds_differently(other, EXPECTED)
    assert "use machines with the same type of processor, or leave out --require-same-bits" in mismatch(
        other, EXPECTED, same_bits=True
    )
    text = rounding_text(["device 3 on n07"], other, {**EXPECTED, "processor": "New CPU, x86_64, AVX-512"})
    assert text.startswith(
        "device 3 on n07 rounds differently from the others (Old CPU, x86_64, AVX2, where the others have New CPU, "
        "x86_64, AVX-512): the result is the same to rounding, not to the bit"
    )


@pytest.mark.parametrize(
    ("information", "expected"),
    [
        ("model name\t: Fast  CPU\nflags\t\t: fpu avx2 avx512f\nmodel name\t: other\n", "Fast CPU, MACHINE, AVX-512"),
        ("model name : Old CPU\nflags : avx2\n", "Old CPU, MACHINE, AVX2"),
        ("Features : fp asimd\nCPU part : 0xd0c\n", "part 0xd0c, MACHINE, NEON"),
    ],
)
def test_the_type_of_a_processor(tmp_path: Path, information: str, expected: str) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(information)
    assert processor(path) == expected.replace("MACHINE", platform.machine())


def test_another_python_is_a_difference_but_no_mismatch() -> None:
    other = {**EXPECTED, "python": "3.13"}
    assert differing(other, EXPECTED) == ["python"]
    assert describe(other, ["python"]) == "Python 3.13"
    assert mismatch(other, EXPECTED) == ""


def test_an_unknown_value_differs_from_nothing() -> None:
    assert differing({}, EXPECTED) == []
    assert mismatch({"hoop": "0.2.0"}, EXPECTED) == ""
