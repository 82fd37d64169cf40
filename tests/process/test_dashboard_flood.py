"""What others open at the dashboard keeps no user from it, and what is printed of their requests is little."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

pytest.importorskip("bokeh", reason="the dashboard needs bokeh: pip install 'hoop[dashboard]'")

from bokeh.protocol.exceptions import ProtocolError
from malformed import CONNECT_S, Site, few_open_files, handshake
from tornado.web import HTTPError

from hoop.dashboard import http_server
from hoop.dashboard.request_log import LINES, PERIOD_S, RequestLog
from hoop.dashboard.server import DashboardConfig, DashboardServer
from hoop.dashboard.view import ClusterView


@pytest.fixture
def server() -> Iterator[DashboardServer]:
    made = DashboardServer(lambda: ClusterView("a cluster", answered=True), DashboardConfig())
    made.start()
    try:
        yield made
    finally:
        made.close()


def connect(server: DashboardServer) -> socket.socket:
    return socket.create_connection((server.address.host, server.address.port), CONNECT_S)


def status_of_a_page(server: DashboardServer) -> int:
    try:
        with urllib.request.urlopen(server.url, timeout=CONNECT_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_idle_connections_keep_nobody_out(server: DashboardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than there may be: each further one takes the place of the oldest."""
    with ExitStack() as idle:
        links = [idle.enter_context(connect(server)) for _ in range(2 * http_server.MAX_CONNECTIONS)]
        assert links[0].recv(1) == b"", "the oldest was closed"
        assert status_of_a_page(server) == 200


def test_a_process_without_free_descriptors_closes_the_oldest_idle_connection(server: DashboardServer) -> None:
    assert status_of_a_page(server) == 200  # its scripts and templates are read
    with few_open_files(), ExitStack() as idle:
        first = idle.enter_context(connect(server))
        with contextlib.suppress(OSError):  # this process holds both ends
            while True:
                idle.enter_context(connect(server))
        assert first.recv(1) == b""
    assert status_of_a_page(server) == 200


def test_a_process_without_any_descriptor_accepts_when_it_has_one_again(server: DashboardServer) -> None:
    with connect(server) as warm:  # the first connection opens files
        warm.sendall(b"x\r\n\r\n")
        assert warm.recv(1)
    with ExitStack() as ours:
        link = ours.enter_context(socket.socket())
        with few_open_files():
            with contextlib.suppress(OSError):
                while True:
                    ours.enter_context(socket.socket())
            link.connect((server.address.host, server.address.port))
        link.settimeout(CONNECT_S)
        link.sendall(b"no request\r\n\r\n")
        assert link.recv(4) == b"HTTP"


def test_downloads_that_are_broken_off_leave_no_file_open(server: DashboardServer) -> None:
    request = f"GET /static/js/bokeh.min.js HTTP/1.1\r\nHost: {server.address}\r\n\r\n".encode()
    for _ in range(100):
        with connect(server) as sock:
            sock.sendall(request)
            assert sock.recv(4) == b"HTTP"
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with urllib.request.urlopen(f"{server.url}/static/js/bokeh.min.js", timeout=CONNECT_S) as answer:
        assert len(answer.read()) == int(answer.headers["Content-Length"])
    with os.scandir("/proc/self/fd") as descriptors:
        names = [os.readlink(one.path) for one in descriptors if os.path.lexists(one.path)]
    assert [name for name in names if name.endswith("bokeh.min.js")] == []


def test_too_many_pages_are_refused_in_a_sentence(
    server: DashboardServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    site = Site(str(server.address), (), page="/")
    request = handshake(site, site.token())
    monkeypatch.setattr("hoop.dashboard.server.MAX_PAGES", 0)
    assert status_of_a_page(server) == 503
    monkeypatch.setattr("hoop.dashboard.http_server.MAX_PAGES", 1)
    first_bytes = []
    with ExitStack() as stack:
        for _ in range(2):
            sock = stack.enter_context(connect(server))
            sock.sendall(request)
            answer = stack.enter_context(sock.makefile("rb"))
            while answer.readline() != b"\r\n":
                pass
            first_bytes.append(answer.read(1))
    assert first_bytes == [b"\x81", b"\x88"], "a message, and the end of the websocket"
    errors = capfd.readouterr().err
    assert "pages are open; close some of them" in errors
    assert "Traceback" not in errors


# ---- what is printed


def record(text: str, error: BaseException | None = None, line: int = 7) -> logging.LogRecord:
    caught = None if error is None else (type(error), error, error.__traceback__)
    return logging.LogRecord("tornado.general", logging.WARNING, "web.py", line, text, None, caught)


def raised_in(module: str, error: Exception) -> Exception:
    """The error, as it was raised by a function of this module."""
    with pytest.raises(type(error)) as caught:
        exec("def fail():\n    raise error\nfail()", {"__name__": module, "error": error})
    return caught.value.with_traceback(caught.value.__traceback__)


def test_a_traceback_is_printed_where_code_of_hoop_has_failed(capsys: pytest.CaptureFixture[str]) -> None:
    log = RequestLog()
    for line, (module, error) in enumerate(
        [
            ("hoop.dashboard.document", ValueError("ours")),
            ("bokeh.server.views.ws", ValueError("theirs\x1b[31m")),
            ("hoop.dashboard.access", HTTPError(403, "refused")),
            ("hoop.dashboard.http_server", ProtocolError("full")),
        ]
    ):
        log.emit(record("a request failed", raised_in(module, error), line))
    ours, *others = capsys.readouterr().err.split("dashboard: ")[1:]
    assert "Traceback" in ours
    assert others[0] == "a request failed: ValueError: theirs\\x1b[31m\n"
    assert all("Traceback" not in text for text in others)
    assert "full" in others[2]


def test_a_statement_prints_a_few_lines_in_a_while(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    log = RequestLog(lambda: now[0])
    for _ in range(LINES + 20):
        log.emit(record("GET /\x1b[2J\nx " + "y" * 9000))
    log.emit(record("another", line=8))
    now[0] = PERIOD_S
    log.emit(record("again"))
    *first, another, again = capsys.readouterr().err.splitlines()
    assert len(first) == LINES
    assert all(len(line) < 500 and "\x1b" not in line for line in first)
    assert another == "dashboard: another"
    assert again == "dashboard: again (20 more like this were not shown)"


def test_a_value_that_cannot_be_shown_costs_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    class Unshown:
        def __repr__(self) -> str:
            raise KeyError("text")

    made = record("a message: %r")
    made.args = (Unshown(),)
    RequestLog().emit(made)
    assert capsys.readouterr().err == "dashboard: a message: %r\n"
