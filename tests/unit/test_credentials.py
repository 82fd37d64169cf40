"""Credentials from the environment and from files: what is empty, or no file, is refused and not waited for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hoop.errors import InvalidArgument
from hoop.transport.link_key import key_of_environment
from hoop.wire.auth import find_credentials
from hoop.wire.certificates import AUTHORITY, CERTIFICATE, KEY, Certificates
from hoop.wire.roles import Role
from hoop.wire.tokens import Token, new_token


def test_a_variable_that_is_set_to_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script whose secret is missing sets it to nothing. That must not start a cluster that is open to everybody."""
    readers: list[Callable[[], object]] = [key_of_environment]
    for name in ("HOOP_TOKEN", "HOOP_TOKEN_FILE", "HOOP_TLS"):
        for value in ("", "  ", "\n"):
            with monkeypatch.context() as environment:
                environment.setenv(name, value)
                for read in [lambda: find_credentials(Role.COORDINATOR), *(readers if name == "HOOP_TOKEN" else [])]:
                    with pytest.raises(InvalidArgument, match=rf"^{name}: it is set, and empty"):
                        read()
    assert not find_credentials(Role.COORDINATOR).required
    with pytest.raises(InvalidArgument, match=r"^token: 0 characters"):
        find_credentials(Role.CLIENT, token="")


def test_the_environment_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOOP_TOKEN", new_token())
    token = find_credentials(Role.DEVICE).token
    assert token is not None
    assert token.link_key == key_of_environment()
    file = tmp_path / "token"
    file.write_text(new_token())
    file.chmod(0o600)
    monkeypatch.delenv("HOOP_TOKEN")
    monkeypatch.setenv("HOOP_TOKEN_FILE", str(file))
    assert find_credentials(Role.DEVICE).required


def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "token", 0o600)
    with pytest.raises(InvalidArgument, match=r"token: not a regular file"):
        Token.read(tmp_path / "token")
    for name in (AUTHORITY, CERTIFICATE, KEY):
        os.mkfifo(tmp_path / name, 0o600)
    with pytest.raises(InvalidArgument, match=r"\.pem: not a regular file"):
        Certificates.load(tmp_path, Role.CLIENT)
