"""The ranks of a module, and pairs of endpoints for a test, over each transport in turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from ranks import URIS, Ranks, endpoints_of

from hoop.transport import Endpoint, Transport, open_transport


@pytest.fixture(params=sorted(URIS))
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


SHARED: list[Ranks] = []


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What the last test broke is made anew before the next one begins to watch what it leaves behind."""
    for ranks in SHARED:
        if ranks.broken:
            ranks.renew()


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """For ``indirect`` parametrization with (scheme, size); shared by the tests that follow one another."""
    with Ranks(*request.param) as made:
        SHARED.append(made)
        yield made
        SHARED.remove(made)


@pytest.fixture
def transports(scheme: str) -> Iterator[list[Transport]]:
    """Two."""
    with ExitStack() as opened:
        yield [opened.enter_context(open_transport(URIS[scheme])) for _ in range(2)]


@pytest.fixture
def pair(transports: list[Transport]) -> Iterator[tuple[Endpoint, Endpoint]]:
    """Rank 0 and rank 1; they have not spoken yet."""
    zero, one = endpoints_of(transports)
    yield zero, one
    zero.close()
    one.close()
