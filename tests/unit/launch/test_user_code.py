"""Whose fault an exception is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn, randn

from hoop.engine.user_code import blaming_user_code
from hoop.errors import InternalError, InvalidArgument, UserError


def test_what_went_through_the_users_code_is_the_users() -> None:
    with (
        pytest.raises(UserError, match=r"your code failed, in spirals.py: ZeroDivisionError") as caught,
        blaming_user_code("in spirals.py"),
    ):
        1 / 0  # noqa: B018 - this file is not Hoop's
    assert "1 / 0" in str(caught.value)


def test_a_layer_that_was_fed_the_wrong_shape_is_the_users() -> None:
    layer, values = nn.Sequential(nn.Linear(3, 3)), randn(2, 5)
    with pytest.raises(UserError, match="mat1 and mat2"), blaming_user_code("in x"):
        layer(values)


def test_a_file_that_is_no_python_is_the_users(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text("def x(:\n")
    with pytest.raises(UserError, match="SyntaxError"), blaming_user_code("loading it"):
        compile(path.read_text(), str(path), "exec")


def test_hoops_own_errors_pass() -> None:
    with pytest.raises(InvalidArgument, match="as it was"), blaming_user_code("in x"):
        raise InvalidArgument("as it was")


def test_everything_else_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    # As if this file were one of the libraries.
    monkeypatch.setattr(
        "hoop.engine.user_code._LIBRARIES", (str(Path(__file__).parent), str(Path(json.__file__).parent))
    )
    with (
        pytest.raises(InternalError, match=r"a bug in Hoop, in x: .*JSONDecodeError"),
        blaming_user_code("in x"),
    ):
        json.loads("{")
