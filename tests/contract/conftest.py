"""Fixtures: the ranks of a module and pairs of endpoints, for each transport."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from ranks import NUMPY, URIS, Ranks, endpoints_of, native_core

from hoop.native import build
from hoop.transport import Endpoint, Transport, open_transport

# The ranks of a module open every socket before its first test. More would be dialled with the first large message of a
# test, which the check for leaks reports; test_tcp_lanes sets its own number.
os.environ.setdefault("HOOP_SOCKETS_PER_LINK", "1")

library, sources = build.HERE / build.LIBRARY, [build.HERE / name for name in build.SOURCES]
if not library.exists() or library.stat().st_mtime < max(one.stat().st_mtime for one in sources):
    with contextlib.suppress(build.BuildError):  # without a compiler the tests of the native core are skipped
        build.build()


@pytest.fixture(params=sorted(URIS))
def scheme(request: pytest.FixtureRequest) -> Iterator[str]:
    with native_core(request.param != NUMPY):
        yield str(request.param)


MODULE_RANKS: list[Ranks] = []


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Reconnects ranks that the previous test broke, before the next test's check for leaks begins."""
    for ranks in MODULE_RANKS:
        if ranks.broken:
            ranks.next_generation()


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """For ``indirect`` parametrization with (scheme, size); shared by consecutive tests of a module."""
    with Ranks(*request.param) as group:
        MODULE_RANKS.append(group)
        yield group
        MODULE_RANKS.remove(group)


@pytest.fixture
def transports(scheme: str) -> Iterator[list[Transport]]:
    """Two transports."""
    with ExitStack() as opened:
        yield [opened.enter_context(open_transport(URIS[scheme])) for _ in range(2)]


@pytest.fixture
def pair(transports: list[Transport]) -> Iterator[tuple[Endpoint, Endpoint]]:
    """The endpoints of rank 0 and rank 1, not connected yet."""
    zero, one = endpoints_of(transports)
    yield zero, one
    zero.close()
    one.close()
