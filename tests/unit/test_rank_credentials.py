"""The token of ranks that a scheduler started: on one host none is needed, on several they refuse to go without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hoop.errors import InvalidArgument
from hoop.runs.meeting import rank_credentials
from hoop.schedulers.base import Placement
from hoop.topology import Address
from hoop.wire.private_files import write_private
from hoop.wire.roles import Role
from hoop.wire.tokens import Token, new_token

HERE = Placement("slurm", 1, 2, 1, 2, Address("127.0.0.1", 4021))
SPREAD = Placement("slurm", 1, 2, 0, 1, Address("n01", 4021))


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOOP_TOKEN", "HOOP_TOKEN_FILE", "HOOP_TLS"):
        monkeypatch.delenv(name, raising=False)


def test_on_one_host_no_token_is_needed() -> None:
    assert not rank_credentials(HERE, None).required


def test_on_several_hosts_a_token_is_needed() -> None:
    with pytest.raises(InvalidArgument, match=r"^token: the ranks of this run meet at n01:4021, .*hoop token FILE"):
        rank_credentials(SPREAD, None)


def test_the_token_comes_from_the_environment_or_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_private(tmp_path / "token", new_token())
    assert rank_credentials(SPREAD, tmp_path / "token").role is Role.DEVICE
    monkeypatch.setenv("HOOP_TOKEN", new_token())
    assert rank_credentials(SPREAD, None).role is Role.DEVICE
    assert rank_credentials(replace(SPREAD, rank=0), None).role is Role.COORDINATOR


def test_a_token_of_a_device_suffices_for_ranks_other_than_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOP_TOKEN", Token.parse(new_token()).role_token(Role.DEVICE))
    assert rank_credentials(SPREAD, None).required
    with pytest.raises(InvalidArgument, match="a coordinator needs the join token"):
        rank_credentials(replace(SPREAD, rank=0), None)


def test_a_token_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    write_private(tmp_path / "token", new_token())
    (tmp_path / "token").chmod(0o644)
    with pytest.raises(InvalidArgument, match="chmod 600"):
        rank_credentials(SPREAD, tmp_path / "token")
