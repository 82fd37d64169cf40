"""The web server of the dashboard: Bokeh's, in a thread with its own event loop.

All scripts come from the installed Bokeh package, through this server: the page needs no internet.
"""

from __future__ import annotations

import asyncio
import secrets
import ssl
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bokeh.application import Application
from bokeh.application.handlers.function import FunctionHandler
from bokeh.document import Document
from bokeh.server.server import BaseServer
from tornado.ioloop import IOLoop
from tornado.netutil import bind_sockets
from tornado.web import HTTPError

from hoop.dashboard.access import ADMIN_PATH, AccessControl, Login, allowed_hosts
from hoop.dashboard.actions import ActionQueue
from hoop.dashboard.document import Page, PageTools, ReadView
from hoop.dashboard.http_server import MAX_PAGES, TOO_MANY_PAGES, BoundedServer, PageApplication
from hoop.dashboard.request_log import print_requests
from hoop.errors import FailedPrecondition, InvalidArgument
from hoop.topology import Address

MAX_BODY_BYTES = 64 << 10
MAX_MESSAGE_BYTES = 1 << 20
"""Of a websocket message from a browser."""
UNUSED_MS = 15_000
"""How long a page is kept after its browser has gone."""
CLOSE_S = 2.0
"""For updates of pages that are under way when the server ends."""
START_S = 60.0


@dataclass(frozen=True)
class DashboardConfig:
    """Where and for whom the page is served."""

    host: str = "127.0.0.1"
    port: int = 0
    login: Login | None = None
    """None: every process of this machine may see the page; only for a loopback address."""
    origins: tuple[str, ...] = ()
    """Further host names, with port, under which browsers reach the page (a proxy's)."""
    certificate: Path | None = None
    """PEM files for HTTPS."""
    key: Path | None = None

    def __post_init__(self) -> None:
        if self.login is None and not Address(self.host, self.port).is_loopback:
            raise InvalidArgument(f"host: {self.host} is beyond this machine, and the page needs a login there")
        if (self.certificate is None) != (self.key is None):
            raise InvalidArgument("certificate, key: give both of them for HTTPS, or none")


class DashboardServer:
    """Serves the page of a feed's views until ``close``."""

    def __init__(
        self,
        read_view: ReadView,
        config: DashboardConfig,
        tools: PageTools | None = None,
        actions: ActionQueue | None = None,
    ) -> None:
        """Opens the port; raises FailedPrecondition if it is taken.

        ``actions``: with a login the page ``/admin`` has buttons for them, and only administrators may open it; without
        one (the demo) the page ``/`` has them.
        """
        self._read_view, self._config, self._tools, self._actions = read_view, config, tools, actions
        self._tls = _tls(config)
        try:
            self._sockets = bind_sockets(config.port, config.host)
        except OSError as error:
            raise FailedPrecondition(
                f"--port {config.port}: {config.host} does not give it: {error.strerror}; choose another, or 0 for any"
            ) from None
        self.address = Address(config.host, self._sockets[0].getsockname()[1])
        self._ready, self._stopping = threading.Event(), asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="hoop-dashboard-server", daemon=True)

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.address.is_wildcard else self.address.host
        return f"{'http' if self._tls is None else 'https'}://{Address(host, self.address.port)}"

    def start(self) -> None:
        """Returns when the page can be opened."""
        print_requests()
        self._thread.start()
        if not self._ready.wait(START_S):
            raise FailedPrecondition(f"the dashboard's server did not start within {START_S:g} s")

    def close(self) -> None:
        """Closes the port and all pages."""
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(START_S)
        for one in self._sockets:
            one.close()

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        config = self._config
        hosts = allowed_hosts(self.address, config.origins)
        application = PageApplication(
            self._applications(),
            extra_websocket_origins=sorted(hosts),
            auth_provider=AccessControl(hosts, config.login, self._tls is not None, self._actions is not None),
            secret_key=secrets.token_bytes(32),
            sign_sessions=True,
            xsrf_cookies=True,
            cookie_secret=secrets.token_hex(32),
            xsrf_cookie_kwargs={"samesite": "Strict", "secure": self._tls is not None},
            websocket_max_message_size_bytes=MAX_MESSAGE_BYTES,
            unused_session_lifetime_milliseconds=UNUSED_MS,
            check_unused_sessions_milliseconds=UNUSED_MS // 3,
            include_headers=[],
            include_cookies=[],
        )
        http = BoundedServer(application, ssl_options=self._tls, max_body_size=MAX_BODY_BYTES)
        http.add_sockets(self._sockets)
        self._server = BaseServer(IOLoop.current(), application, http)
        self._server.start()
        self._ready.set()
        try:
            await self._stopping.wait()
        finally:
            self._server.stop()
            await http.close_all_connections()
            self._server.unlisten()
            # Updates of pages that are under way end now, because their connections are closed. Cancelled instead, they
            # would leave messages that Python reports as never sent.
            if others := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(others, timeout=CLOSE_S)

    def _applications(self) -> dict[str, Application]:
        """By path: the page, and for administrators the page with buttons."""
        needs_admin = self._actions is not None and self._config.login is not None
        found = {"/": Application(FunctionHandler(partial(self._open_page, None if needs_admin else self._actions)))}
        if needs_admin:
            found[ADMIN_PATH] = Application(FunctionHandler(partial(self._open_page, self._actions)))
        return found

    def _open_page(self, actions: ActionQueue | None, document: Document) -> Any:
        paths = ("/", ADMIN_PATH) if self._actions is not None and self._config.login is not None else ("/",)
        if sum(len(self._server.get_sessions(path)) for path in paths) > MAX_PAGES:
            raise HTTPError(503, TOO_MANY_PAGES)
        Page(document, self._read_view, self._tools, actions, _requested_tab(document))


def _requested_tab(document: Document) -> str:
    """The argument ``tab`` of the page's address; empty without one."""
    context = document.session_context
    values = context.request.arguments.get("tab", []) if context is not None and context.request is not None else []
    return values[0].decode("utf-8", "replace").lower() if values else ""


def _tls(config: DashboardConfig) -> ssl.SSLContext | None:
    if config.certificate is None or config.key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.certificate, config.key)
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgument(
            f"--certificate {config.certificate}, --key {config.key}: {error}; give PEM files that belong together"
        ) from None
    return context
