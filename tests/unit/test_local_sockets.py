"""The sockets of one user's servers: where they are, who may reach them, and who takes over the name of another."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hoop.errors import FailedPrecondition, InvalidArgument
from hoop.topology import Addresses
from hoop.wire.local_sockets import LocalSocket, has_socket, remove_stale, socket_path, socket_target
from hoop.wire.runtime_folder import runtime_folder
from hoop.wire.tokens import token_of_user

PORT = 4021
HERE = Addresses.parse(f"127.0.0.1:{PORT}")


@pytest.fixture(autouse=True)
def runtime(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime directory of this test's own; the folder of sockets in it does not exist yet."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_folder))
    return short_folder / "hoop"


@contextmanager
def serving(port: int = PORT) -> Iterator[LocalSocket]:
    """A live server, which withdraws nothing: at the end it is as if it were killed."""
    local = LocalSocket()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(local.target.removeprefix("unix:"))
        sock.listen()
        local.publish(port)
        yield local


def connects() -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        return sock.connect_ex(str(socket_path(PORT))) == 0


def test_a_server_is_found_by_its_loopback_addresses_and_by_no_others(runtime: Path) -> None:
    assert not has_socket(HERE)
    with serving() as local:
        for text in ("127.0.0.1:4021", "localhost:4021", "[::1]:4021", "127.0.0.1:4020,127.0.0.1:4021"):
            assert has_socket(Addresses.parse(text)), text
        for text in ("127.0.0.1:4020", "10.0.0.1:4021", "127.0.0.1:4021,10.0.0.1:4021"):
            assert not has_socket(Addresses.parse(text)), text
        assert socket_target(PORT) == f"unix:{runtime}/{PORT}.sock"
        assert stat.S_IMODE(runtime.stat().st_mode) == 0o700
        assert [stat.S_IMODE(path.stat().st_mode) for path in runtime.iterdir()] == [0o600]
        assert connects()
        local.withdraw()
    assert not has_socket(HERE)
    assert list(runtime.iterdir()) == []


def test_a_killed_server_leaves_its_name_which_leads_nowhere_until_the_next_one_takes_it() -> None:
    with serving() as killed:
        pass
    assert has_socket(HERE), "callers go there and not to the TCP port"
    assert not connects()
    with serving():
        assert connects()
        killed.withdraw()
        assert connects(), "the name is another server's now"


def test_of_two_live_servers_with_one_port_the_second_is_refused() -> None:
    """Ports of two network namespaces may be equal."""
    with serving():
        with pytest.raises(FailedPrecondition, match=r"4021\.sock: another process of yours answers there"), serving():
            pass
        assert connects()


def test_what_a_killed_server_has_left_is_removed_and_a_live_socket_is_not() -> None:
    with serving():
        remove_stale([PORT, PORT + 1])
        assert has_socket(HERE)
    remove_stale([PORT])
    assert not has_socket(HERE)


@pytest.mark.parametrize("mode", [0o777, 0o750, 0o701])
def test_a_folder_that_others_can_open_is_refused(runtime: Path, mode: int) -> None:
    runtime.mkdir()
    runtime.chmod(mode)
    for use in (LocalSocket, lambda: has_socket(HERE), token_of_user):
        with pytest.raises(FailedPrecondition, match=rf"mode {mode:o}.*chmod 700 {runtime}.*XDG_RUNTIME_DIR"):
            use()


def test_a_folder_that_is_a_link_is_refused(runtime: Path, tmp_path: Path) -> None:
    own = tmp_path / "elsewhere"
    own.mkdir(mode=0o700)
    runtime.symlink_to(own)
    for use in (LocalSocket, lambda: has_socket(HERE), token_of_user):
        with pytest.raises(FailedPrecondition, match="not a folder of yours"):
            use()


def test_a_folder_that_others_can_replace_is_refused(runtime: Path) -> None:
    runtime.mkdir(mode=0o700)
    runtime.parent.chmod(0o777)
    with pytest.raises(FailedPrecondition, match="another user can replace it"):
        LocalSocket()
    runtime.parent.chmod(0o1777)
    assert not has_socket(HERE)


def test_a_name_that_is_no_socket_is_replaced_and_no_link_is_followed(runtime: Path, tmp_path: Path) -> None:
    runtime.mkdir(mode=0o700)
    planted = tmp_path / "planted"
    planted.write_text("mine")
    socket_path(PORT).symlink_to(planted)
    with serving():
        assert connects()
    assert planted.read_text() == "mine"


def test_a_path_that_is_too_long_for_a_socket_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    with pytest.raises(FailedPrecondition, match=r"too long for the path of a socket.*XDG_RUNTIME_DIR"):
        LocalSocket()


def test_a_runtime_directory_that_is_not_ours_is_not_used(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runtime_folder() == short_folder / "hoop"
    for given in ("", "relative", str(short_folder / "missing")):
        monkeypatch.setenv("XDG_RUNTIME_DIR", given)
        assert runtime_folder().name == f"hoop-{os.geteuid()}"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_folder))
    user = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert runtime_folder().name == f"hoop-{user}"
    of_another = short_folder / "hoop"
    of_another.mkdir(mode=0o700)
    monkeypatch.setattr("hoop.wire.runtime_folder.runtime_folder", lambda: of_another)
    with pytest.raises(FailedPrecondition, match=rf"user {user - 1} owns it") as refused:
        has_socket(HERE)
    assert "chmod" not in str(refused.value), "only its owner could"


# ---- the token of the user


def test_all_processes_of_a_user_have_one_token(runtime: Path) -> None:
    assert token_of_user() == token_of_user()
    assert [path.name for path in runtime.iterdir()] == ["user.token"]
    assert stat.S_IMODE((runtime / "user.token").stat().st_mode) == 0o600


def test_a_user_s_token_that_others_can_read_is_refused(runtime: Path) -> None:
    token_of_user()
    (runtime / "user.token").chmod(0o644)
    with pytest.raises(InvalidArgument, match="chmod 600"):
        token_of_user()
