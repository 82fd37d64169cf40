"""The error hierarchy matches its drawing in hoop.errors, and errors survive a round trip over the wire."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import grpc
import pytest

from hoop import errors
from hoop.errors import HoopError, error_from_name


def tree(kind: type[HoopError], depth: int = 0) -> list[tuple[int, type[HoopError]]]:
    """A class and its subclasses in definition order, each with its depth."""
    ours = [child for child in kind.__subclasses__() if child.__module__ == "hoop.errors"]
    return [(depth, kind), *(below for child in ours for below in tree(child, depth + 1))]


KINDS = [kind for _, kind in tree(HoopError)]
CLASS_BY_STATUS = {
    "UNKNOWN": errors.HoopError,
    "INVALID_ARGUMENT": errors.InvalidArgument,
    "OUT_OF_RANGE": errors.OutOfRange,
    "NOT_FOUND": errors.NotFound,
    "FAILED_PRECONDITION": errors.FailedPrecondition,
    "RESOURCE_EXHAUSTED": errors.ResourceExhausted,
    "UNAUTHENTICATED": errors.Unauthenticated,
    "PERMISSION_DENIED": errors.PermissionDenied,
    "UNAVAILABLE": errors.PeerLost,
    "DEADLINE_EXCEEDED": errors.DeadlineExceeded,
    "DATA_LOSS": errors.LinkCorrupted,
    "ABORTED": errors.MembershipChanged,
    "INTERNAL": errors.InternalError,
}
"""The class that a gRPC status without a class name becomes."""


def test_the_drawing_matches_the_class_tree() -> None:
    assert errors.__doc__ is not None
    drawn = re.findall(r"^    ([│├└─ ]*)([A-Z]\w+)", errors.__doc__, re.MULTILINE)
    assert [(len(lines) // 4, name) for lines, name in drawn] == [
        (depth, kind.__name__) for depth, kind in tree(HoopError)
    ]


def test_no_error_is_defined_outside_errors_py() -> None:
    package = Path(errors.__file__).parent
    names = {kind.__name__ for kind in KINDS}
    candidate = re.compile(rf"\bclass\s[^:]*\b(?:{'|'.join(names)})\b")  # to parse every file takes seconds
    texts = [(path, path.read_text("utf-8")) for path in sorted(package.rglob("*.py"))]
    strays = [
        f"{path.relative_to(package)}:{node.lineno} {node.name}"
        for path, text in texts
        # The torch backend subclasses these errors, because its errors must be torch's errors as well.
        if path not in (Path(errors.__file__), package / "torch_backend" / "errors.py") and candidate.search(text)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
        for base in node.bases
        if (base.id if isinstance(base, ast.Name) else getattr(base, "attr", "")) in names
    ]
    assert not strays, "every error belongs in errors.py: " + ", ".join(strays)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_survives_the_round_trip(kind: type[HoopError]) -> None:
    sent = kind("rank 2: 'gone'")
    back = error_from_name(kind.__name__, str(sent))
    assert type(back) is kind
    assert str(back) == "rank 2: 'gone'"
    bare = error_from_name(kind.code, str(sent))
    assert type(bare) is CLASS_BY_STATUS[kind.code]
    assert bare.code == kind.code
    assert str(bare) == "rank 2: 'gone'"
    assert kind.__doc__


def test_every_code_is_a_grpc_status_with_one_class() -> None:
    assert {kind.code for kind in KINDS} == set(CLASS_BY_STATUS)
    assert set(CLASS_BY_STATUS) <= {status.name for status in grpc.StatusCode}


@pytest.mark.parametrize("name", ["", "OK", "CANCELLED", "hooperror", "Exception", "named"])
def test_an_unknown_name_becomes_a_hoop_error(name: str) -> None:
    assert type(error_from_name(name, "what")) is HoopError
    assert str(error_from_name(name, "what")) == "what"


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.InvalidArgument, ValueError),
        (errors.OutOfRange, IndexError),
        (errors.NotFound, LookupError),
        (errors.OutOfMemory, MemoryError),
        (errors.PeerLost, ConnectionError),
        (errors.DeadlineExceeded, TimeoutError),
    ],
)
def test_errors_are_also_builtin_exceptions(kind: type[HoopError], builtin: type[Exception]) -> None:
    with pytest.raises(builtin):
        raise kind("what")
