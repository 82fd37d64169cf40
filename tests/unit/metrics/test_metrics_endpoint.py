"""The HTTP endpoint ``/metrics``: who may read it, and what a slow scraper costs."""

from __future__ import annotations

import http.client
import importlib.util
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="prometheus-client is not installed (hoop[dashboard])")

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hoop.errors import FailedPrecondition, InvalidArgument
from hoop.servers import metrics_endpoint
from hoop.servers.metrics_endpoint import MAX_SCRAPES, MetricsEndpoint
from hoop.servers.metrics_options import check_metrics, device_metrics_address, parse_metrics
from hoop.topology import Address
from hoop.wire.auth import Credentials
from hoop.wire.roles import Role
from hoop.wire.tokens import Token, new_token

ANY = Address("127.0.0.1", 0)
WAIT_S = 60.0


class One(Collector):
    """One metric of a given value."""

    def __init__(self, value: float = 1.0) -> None:
        self.value = value

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("one", "A value.", value=self.value)


Serve = Callable[..., MetricsEndpoint]


@pytest.fixture
def serve() -> Iterator[Serve]:
    with ExitStack() as stack:

        def start(address: Address = ANY, collector: Collector | None = None, token: Token | None = None):  # type: ignore[no-untyped-def]
            endpoint = MetricsEndpoint(address, collector or One(), token)
            endpoint.start()
            stack.callback(endpoint.stop)
            return endpoint

        yield start


def get(endpoint: MetricsEndpoint, path: str = "/metrics", method: str = "GET", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", endpoint.address.port, timeout=WAIT_S)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_it_serves_metrics_and_nothing_else(serve: Serve) -> None:
    endpoint = serve()
    status, text = get(endpoint)
    assert status == 200
    assert "\none 1.0\n" in text
    assert "process_" in text
    assert get(endpoint, "/")[0] == 404
    assert get(endpoint, "/metrics/../x")[0] == 404
    assert get(endpoint, method="POST")[0] == 405
    assert "one 1.0" in get(endpoint, "/metrics?name[]=one")[1]


def test_two_endpoints_of_one_process_do_not_mix(serve: Serve) -> None:
    first, second = serve(collector=One(1)), serve(collector=One(2))
    assert "\none 1.0\n" in get(first)[1]
    assert "\none 2.0\n" in get(second)[1]


def test_beyond_loopback_a_viewer_s_token_is_needed(serve: Serve) -> None:
    text, other = new_token(), new_token()
    token = Token.parse(text)
    endpoint = serve(Address("0.0.0.0", 0), token=token)
    assert get(endpoint)[0] == 401
    assert get(endpoint, Authorization=f"Bearer {Token.parse(other).role_token('viewer')}")[0] == 401
    assert get(endpoint, Authorization=f"Bearer {text}")[0] == 401, "the join token belongs on no scraper"
    assert get(endpoint, Authorization=f"Basic {token.role_token('viewer')}")[0] == 401
    status, body = get(endpoint, Authorization=f"Bearer {token.role_token('viewer')}")
    assert (status, "one 1.0" in body) == (200, True)


def test_a_web_page_that_names_loopback_its_own_host_is_refused(serve: Serve) -> None:
    endpoint = serve()
    assert get(endpoint, Host="evil.example:9400")[0] == 403
    assert get(endpoint, Host="[")[0] == 403
    assert get(endpoint, Host="localhost:9400")[0] == 200
    assert get(endpoint, Host="[::1]:9400")[0] == 200


def test_slow_scrapers_occupy_a_few_threads_for_a_bounded_time(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_endpoint, "SCRAPE_S", 2.0)
    endpoint = serve()
    began = time.monotonic()
    with ExitStack() as stack:
        dead = [
            stack.enter_context(socket.create_connection(("127.0.0.1", endpoint.address.port), WAIT_S))
            for _ in range(MAX_SCRAPES + 8)
        ]
        for one in dead[MAX_SCRAPES:]:
            assert one.recv(1) == b"", "closed at once: all threads are taken"
        names = [one.name for one in threading.enumerate() if one.name.startswith("hoop-scrape")]
        assert len(names) <= MAX_SCRAPES
        for one in dead[:MAX_SCRAPES]:
            with suppress(ConnectionError):  # it may have hung up already
                one.sendall(b"GET /metr")
                while one.recv(100):  # until the server hangs up
                    pass
    assert time.monotonic() - began >= 1.5, "they were answered, not refused"
    deadline = time.monotonic() + WAIT_S
    while True:  # the threads may need a moment to notice
        try:
            assert get(endpoint)[0] == 200
            break
        except OSError:
            assert time.monotonic() < deadline


def test_a_stop_does_not_wait_for_scrapers(serve: Serve) -> None:
    endpoint = serve()
    with socket.create_connection(("127.0.0.1", endpoint.address.port), WAIT_S) as dead:
        dead.sendall(b"GET /metr")
        endpoint.stop()
        assert not [one for one in threading.enumerate() if one.name.startswith(("hoop-scrape", "hoop-metrics"))]


def test_a_port_that_is_taken_is_named(serve: Serve) -> None:
    taken = serve().address
    with pytest.raises(FailedPrecondition, match=f"--metrics: cannot listen on {taken}"):
        MetricsEndpoint(taken, One()).start()


def test_the_value_of_the_option() -> None:
    assert parse_metrics("9400") == Address("127.0.0.1", 9400)
    assert parse_metrics("0.0.0.0:9400") == Address("0.0.0.0", 9400)
    assert parse_metrics("[::1]:0") == Address("::1", 0)
    for wrong in ("", "x", "99999", "host:", ":9400", "-1", "٣"):
        with pytest.raises(InvalidArgument, match=r"^--metrics: .* is neither a port"):
            parse_metrics(wrong)


def test_devices_of_up_have_the_following_ports() -> None:
    coordinator = Address("0.0.0.0", 9400)
    assert device_metrics_address(coordinator, 3) == Address("0.0.0.0", 9403)
    assert device_metrics_address(ANY, 3) == ANY
    with pytest.raises(InvalidArgument, match="--metrics: device 9 would listen on port 65544"):
        device_metrics_address(Address("127.0.0.1", 65535), 9)


def test_metrics_are_not_open_to_other_hosts_by_accident(caplog: pytest.LogCaptureFixture) -> None:
    nobody, everywhere = Credentials(Role.COORDINATOR), Address("0.0.0.0", 9400)
    check_metrics(ANY, nobody, insecure=False)
    check_metrics(everywhere, Credentials(Role.COORDINATOR, Token.parse(new_token())), insecure=False)
    with pytest.raises(InvalidArgument, match=r"--metrics: 0\.0\.0\.0 can be reached from other machines"):
        check_metrics(everywhere, nobody, insecure=False)
    check_metrics(everywhere, nobody, insecure=True)
    assert "everyone there can read the metrics" in caplog.text


def test_without_the_library_the_option_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FailedPrecondition, match=r"pip install 'hoop\[dashboard\]'"):
        check_metrics(ANY, Credentials(Role.COORDINATOR), insecure=False)


def test_no_module_that_a_server_always_loads_needs_the_library() -> None:
    folder = Path(metrics_endpoint.__file__).parent
    users = {path.name for path in folder.glob("*.py") if "prometheus_client" in path.read_text("utf-8")}
    assert users == {"coordinator_metrics.py", "device_metrics.py", "metrics_endpoint.py", "metrics_options.py"}
