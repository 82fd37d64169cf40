"""The address file: written atomically, and through no link that another user planted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hoop.errors import FailedPrecondition
from hoop.servers.grpc_server import write_address_file
from hoop.topology import Address

ADDRESS = Address("127.0.0.1", 4021)


def test_the_address_file_is_written_through_no_planted_link(tmp_path: Path) -> None:
    victim, file = tmp_path / "victim", tmp_path / "address"
    victim.write_text("precious")
    (tmp_path / f".address.{os.getpid()}").symlink_to(victim)  # the temporary file's name until 0.2.0
    file.symlink_to(victim)
    write_address_file(file, ADDRESS)
    assert (file.read_text(), victim.read_text()) == ("127.0.0.1:4021\n", "precious")
    assert not file.is_symlink()


def test_the_folder_of_the_address_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match=r"nowhere/address: there is no folder .*nowhere; make it first"):
        write_address_file(tmp_path / "nowhere" / "address", ADDRESS)
    assert list(tmp_path.iterdir()) == []
