"""Exceptions are attributed to the user's code or to Hoop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import OutOfMemoryError, nn, randn

from hoop.engine.user_code import attribute_exceptions
from hoop.errors import FailedPrecondition, InternalError, InvalidArgument, UserError


def test_an_exception_of_user_code_is_a_user_error() -> None:
    with (
        pytest.raises(UserError, match=r"your code failed, in spirals.py: ZeroDivisionError") as caught,
        attribute_exceptions("in spirals.py"),
    ):
        1 / 0  # noqa: B018 - this file is not Hoop's
    assert "1 / 0" in str(caught.value)


def test_a_full_gpu_is_not_the_fault_of_the_code_that_asked_last() -> None:
    with (
        pytest.raises(
            FailedPrecondition, match=r"memory: a GPU is full, in x: torch.OutOfMemoryError: CUDA out of"
        ) as it,
        attribute_exceptions("in x"),
    ):
        raise OutOfMemoryError("CUDA out of memory")
    assert "your code" not in str(it.value)


def test_a_wrong_input_shape_is_a_user_error() -> None:
    layer, values = nn.Sequential(nn.Linear(3, 3)), randn(2, 5)
    with pytest.raises(UserError, match="mat1 and mat2"), attribute_exceptions("in x"):
        layer(values)


def test_a_syntax_error_is_a_user_error(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text("def x(:\n")
    with pytest.raises(UserError, match="SyntaxError"), attribute_exceptions("loading it"):
        compile(path.read_text(), str(path), "exec")


def test_errors_of_hoop_pass_unchanged() -> None:
    with pytest.raises(InvalidArgument, match="as it was"), attribute_exceptions("in x"):
        raise InvalidArgument("as it was")


def test_any_other_exception_is_a_bug_in_hoop(monkeypatch: pytest.MonkeyPatch) -> None:
    # As if this file were one of the libraries.
    monkeypatch.setattr("hoop.user_frames._LIBRARIES", (str(Path(__file__).parent), str(Path(json.__file__).parent)))
    with (
        pytest.raises(InternalError, match=r"a bug in Hoop, in x: .*JSONDecodeError"),
        attribute_exceptions("in x"),
    ):
        json.loads("{")
