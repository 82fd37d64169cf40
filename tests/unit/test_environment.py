"""Versions and arithmetic of devices: differences are named with their remedy."""

from __future__ import annotations

import sys

import hoop
from hoop.environment import describe, differing, mismatch, versions

EXPECTED = {"hoop": "0.2.0", "torch": "2.13.0", "python": "3.11", "arithmetic": "aa"}


def test_the_versions_of_this_process() -> None:
    found = versions()
    assert found["hoop"] == hoop.__version__
    assert found["torch"].count(".") >= 2
    assert "+" not in found["torch"]
    assert found["python"] == f"{sys.version_info.major}.{sys.version_info.minor}"


def test_a_difference_that_may_change_the_result_is_named_with_its_remedy() -> None:
    text = mismatch({**EXPECTED, "torch": "2.15.0", "arithmetic": "bb"}, EXPECTED)
    assert text.startswith("PyTorch 2.15.0, the result of the numeric probe bb, where the others have PyTorch 2.13.0, ")
    assert "install the same version of PyTorch on every machine" in text
    assert "use machines with the same type of processor" in text
    assert "--set allow_mixed=true" in text


def test_another_python_is_a_difference_but_no_mismatch() -> None:
    other = {**EXPECTED, "python": "3.13"}
    assert differing(other, EXPECTED) == ["python"]
    assert describe(other, ["python"]) == "Python 3.13"
    assert mismatch(other, EXPECTED) == ""


def test_an_unknown_value_differs_from_nothing() -> None:
    assert differing({}, EXPECTED) == []
    assert mismatch({"hoop": "0.2.0"}, EXPECTED) == ""
