"""The HTTP endpoint ``/metrics`` of a coordinator or a device, for Prometheus (``--metrics [HOST:]PORT``).

    scraper ── GET /metrics ──▶ hoop-metrics        one thread accepts connections
                                hoop-scrape (4)     at most four answer them, each within SCRAPE_S seconds

Nothing is collected between scrapes: a collector reads the server's state when it is asked (``coordinator_metrics``,
``device_metrics``). The event loop and the training thread take no part in a scrape, so a scraper that is slow or dead
occupies one of the four threads and nothing else; a fifth connection is closed.

On loopback every user of the machine may scrape. Beyond it the scraper sends a viewer's token
(``Authorization: Bearer …``; ``hoop token FILE --role viewer``). This module imports prometheus-client, an extra:
``servers.metrics_options`` is what other modules import.
"""

from __future__ import annotations

import errno
import logging
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.registry import Collector

from hoop.errors import FailedPrecondition
from hoop.texts import printable
from hoop.topology import Address
from hoop.wire.tokens import Token

log = logging.getLogger("hoop.servers")
PATH = "/metrics"
MAX_SCRAPES = 4
"""Maximum number of connections that are answered at the same time."""
SCRAPE_S = 10.0
"""Seconds that a connection may last, from the first byte to the last."""
POLL_S = 0.25
"""Seconds between two checks, by the accepting thread, for connections that have lasted too long."""
MAX_LABEL_BYTES = 64
"""Maximum bytes of a label's value; longer ones are shortened."""

Environ = dict[str, Any]
StartResponse = Callable[..., Any]


def label(text: object) -> str:
    """A label value of bounded length, without control characters. The library escapes quotes and backslashes."""
    return printable(str(text).replace("\n", " ").replace("\t", " "), MAX_LABEL_BYTES)


class _Handler(WSGIRequestHandler):
    """Reads one request and answers it. Nothing is logged: a scraper comes every few seconds."""

    timeout = SCRAPE_S / 2  # for one read or write; ``_Server`` bounds the whole connection

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the standard library
        pass


class _Server(WSGIServer):
    """A WSGI server with a bounded number of threads, which closes connections that last too long."""

    request_queue_size = 16

    def __init__(self, address: Address) -> None:
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self._threads = ThreadPoolExecutor(MAX_SCRAPES, thread_name_prefix="hoop-scrape")
        self._open: dict[socket.socket, float] = {}
        """Connections that are being answered, with the time at which they are closed."""
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        super().__init__((address.host, address.port), _Handler)

    def server_bind(self) -> None:
        """Without the look-up of this host's name that ``http.server`` does, which may take long."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # the connection stays in the queue: do not spin
                self._stopping.wait(POLL_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            full = len(self._open) >= MAX_SCRAPES
            if not full:
                self._open[request] = time.monotonic() + SCRAPE_S
        if full:
            self.shutdown_request(request)
        else:
            self._threads.submit(self._answer, request, client_address)

    def _answer(self, request: Any, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except Exception:  # a scraper that goes away, or a mistake of ours: the server goes on
            self.handle_error(request, client_address)
        finally:
            with self._lock:
                self._open.pop(request, None)
            self.shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("metrics: a scrape failed: %s", sys.exc_info()[1])

    def service_actions(self) -> None:
        """Called by ``serve_forever`` after each wait: ends connections that have lasted too long."""
        now = time.monotonic()
        self._hang_up(lambda until: until <= now)

    def _hang_up(self, which: Callable[[float], bool]) -> None:
        with self._lock:
            for connection, until in self._open.items():
                if which(until):
                    try:
                        connection.shutdown(socket.SHUT_RDWR)
                    except OSError:
                        log.debug("metrics: the scraper is gone already")

    def stop(self) -> None:
        """Ends all connections, and waits for the threads that answer them."""
        self._stopping.set()
        self.shutdown()
        self._hang_up(lambda until: True)
        self.server_close()
        self._threads.shutdown(wait=True)


class MetricsEndpoint:
    """Serves the metrics of one collector at an address, from ``start`` to ``stop``."""

    def __init__(self, address: Address, collector: Collector, token: Token | None = None) -> None:
        """``token``: scrapers send a viewer's token of this cluster; None: they need none.

        The registry is this endpoint's own: several servers in one process do not mix.
        """
        registry = CollectorRegistry(support_collectors_without_names=True)
        registry.register(collector)
        ProcessCollector(registry=registry)
        self._app = make_wsgi_app(registry)
        self._token = token
        self._wanted = self.address = address
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> Address:
        """Listens, and serves on threads of its own. Returns the address; port 0 picks a free port."""
        try:
            self._server = _Server(self._wanted)
        except OSError as error:
            raise FailedPrecondition(
                f"--metrics: cannot listen on {self._wanted}: {error.strerror}; choose another port, or 0 for any"
            ) from None
        self._server.set_app(self._answer)
        self.address = Address(self._wanted.host, self._server.server_port)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_S,), name="hoop-metrics", daemon=True
        )
        self._thread.start()
        return self.address

    def stop(self) -> None:
        """Ends it. Waits for its threads, less than a second; a scrape that is being answered fails."""
        if self._server is not None and self._thread is not None:
            self._server.stop()
            self._thread.join()
        self._server = self._thread = None

    @property
    def url(self) -> str:
        return f"http://{self.address}{PATH}"

    def _answer(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """The WSGI application: checks the path and the caller, then lets prometheus-client answer."""
        if environ.get("PATH_INFO") != PATH:
            return _refuse(start_response, "404 Not Found", f"only {PATH} is here")
        if self._token is not None:
            scheme, _, presented = str(environ.get("HTTP_AUTHORIZATION", "")).partition(" ")
            if scheme.lower() != "bearer" or not self._token.is_viewer(presented.strip()):
                text = "send 'Authorization: Bearer TOKEN' with what `hoop token FILE --role viewer` wrote"
                return _refuse(start_response, "401 Unauthorized", text, ("WWW-Authenticate", "Bearer"))
        elif self.address.is_loopback and not _names_loopback(str(environ.get("HTTP_HOST", ""))):
            # A web page whose host name was made to point here must not read it through the user's browser.
            return _refuse(start_response, "403 Forbidden", "on loopback the Host header is localhost or 127.0.0.1")
        answer: Iterable[bytes] = self._app(environ, start_response)
        return answer


def _names_loopback(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    return not host or (name is not None and Address(name, 0).is_loopback)


def _refuse(start_response: StartResponse, status: str, text: str, *headers: tuple[str, str]) -> Iterable[bytes]:
    start_response(status, [("Content-Type", "text/plain; charset=utf-8"), *headers])
    return [f"{text}\n".encode()]
