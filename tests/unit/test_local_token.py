"""The token that a coordinator on loopback makes for itself: where it is, who may read it, and who gets it again."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hoop.errors import FailedPrecondition, InvalidArgument
from hoop.topology import Address, Addresses
from hoop.wire.tokens import LocalToken, find_token, forget, runtime_folder

PORT = 4021
HERE = Address("127.0.0.1", PORT)


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime directory of this test's own; the folder of tokens in it does not exist yet."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "hoop"


def test_a_published_token_is_found_by_its_loopback_address_and_by_no_other(runtime: Path) -> None:
    assert find_token(HERE) is None
    local = LocalToken.obtain(PORT)
    local.publish(PORT)
    for text in ("127.0.0.1:4021", "localhost:4021", "[::1]:4021", "127.0.0.1:4020,127.0.0.1:4021"):
        assert find_token(Addresses.parse(text)) == local.token
    for text in ("127.0.0.1:4020", "10.0.0.1:4021", "127.0.0.1:4021,10.0.0.1:4021"):
        assert find_token(Addresses.parse(text)) is None
    assert stat.S_IMODE(runtime.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in runtime.iterdir()] == [0o600]
    local.withdraw()
    assert find_token(HERE) is None
    assert list(runtime.iterdir()) == []


def test_the_token_is_not_shown() -> None:
    local = LocalToken()
    assert local.text not in repr(local)
    assert local.text != LocalToken().text


def test_a_successor_at_the_same_port_uses_the_token_that_was_left() -> None:
    first = LocalToken.obtain(PORT)
    first.publish(PORT)  # and the process is killed
    assert LocalToken.obtain(PORT).text == first.text
    assert LocalToken.obtain(PORT + 1).text != first.text
    assert LocalToken.obtain(0).text != first.text


def test_a_journal_keeps_its_token(tmp_path: Path) -> None:
    """Beside a journal that is a file, else in the runtime folder; at any port, also after an orderly end."""
    for journal in (tmp_path / "state" / "journal", "etcd://127.0.0.1:2379/hoop"):
        first = LocalToken.obtain(0, journal)
        first.publish(PORT)
        first.withdraw()
        assert first.kept
        assert LocalToken.obtain(PORT + 1, journal).text == first.text
    assert stat.S_IMODE((tmp_path / "state" / "journal.token").stat().st_mode) == 0o600
    assert LocalToken.obtain(0, tmp_path / "other").text != LocalToken.obtain(0, tmp_path / "state" / "journal").text


def test_a_coordinator_removes_no_token_of_another() -> None:
    first, second = LocalToken.obtain(0), LocalToken.obtain(0)
    first.publish(PORT)
    second.publish(PORT)
    first.withdraw()
    assert find_token(HERE) == second.token
    forget(PORT)  # one with credentials of its own has the port now
    assert find_token(HERE) is None


@pytest.mark.parametrize("mode", [0o777, 0o750, 0o701])
def test_a_folder_that_others_can_open_is_refused(runtime: Path, mode: int) -> None:
    runtime.mkdir()
    runtime.chmod(mode)
    for call in (lambda: LocalToken.obtain(PORT), lambda: find_token(HERE), lambda: LocalToken().publish(PORT)):
        with pytest.raises(FailedPrecondition, match=rf"mode {mode:o}.*chmod 700 {runtime}.*XDG_RUNTIME_DIR"):
            call()
    LocalToken(required=False).publish(PORT)  # a training's own processes need no file


def test_no_link_is_followed(runtime: Path, tmp_path: Path) -> None:
    own = tmp_path / "elsewhere"
    own.mkdir(mode=0o700)
    runtime.symlink_to(own)
    with pytest.raises(FailedPrecondition, match="not a folder of yours"):
        LocalToken.obtain(PORT)
    runtime.unlink()
    runtime.mkdir(mode=0o700)
    (own / "planted").write_text("x" * 64)
    (runtime / f"{PORT}.token").symlink_to(own / "planted")
    with pytest.raises(InvalidArgument, match="not a token of yours"):
        find_token(HERE)
    LocalToken().publish(PORT)  # replaces the link, and not what it names
    assert (own / "planted").read_text() == "x" * 64


def test_a_token_that_others_can_read_is_refused(runtime: Path) -> None:
    LocalToken.obtain(PORT).publish(PORT)
    (runtime / f"{PORT}.token").chmod(0o644)
    with pytest.raises(InvalidArgument, match="chmod 600"):
        find_token(HERE)


def test_a_runtime_directory_that_is_not_ours_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runtime_folder() == tmp_path / "hoop"
    for given in ("", "relative", str(tmp_path / "missing")):
        monkeypatch.setenv("XDG_RUNTIME_DIR", given)
        assert runtime_folder().name == f"hoop-{os.geteuid()}"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    user = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert runtime_folder().name == f"hoop-{user}"
    runtime_folder_of_another = tmp_path / "hoop"
    runtime_folder_of_another.mkdir(mode=0o700)
    monkeypatch.setattr("hoop.wire.tokens.runtime_folder", lambda: runtime_folder_of_another)
    with pytest.raises(FailedPrecondition, match=rf"user {user - 1} owns it") as refused:
        find_token(HERE)
    assert "chmod" not in str(refused.value), "only its owner could"
