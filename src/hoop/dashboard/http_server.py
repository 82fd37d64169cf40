"""Tornado's HTTP server and Bokeh's application with a bounded number of connections.

Every user of the machine can open connections. Those that are no websockets are at most ``MAX_CONNECTIONS``, and a
quarter of the files that this process may open: a further one takes the place of the oldest, and so does one for which
no descriptor is left. Websockets are at most ``MAX_PAGES``, as many as there are pages. A download that is broken off
leaves no file open.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bokeh.protocol.exceptions import ProtocolError
from bokeh.server.tornado import BokehTornado
from bokeh.server.views.static_handler import StaticHandler
from tornado.httpserver import HTTPServer
from tornado.ioloop import IOLoop
from tornado.netutil import add_accept_handler

from hoop.transport.accepting import NO_DESCRIPTOR_ERRORS, PAUSE_S, pending_limit

MAX_PAGES = 64
"""Browser pages that are open at once; each takes some MB."""
MAX_CONNECTIONS = 256
MAX_SCRIPTS = 64
"""Files that are kept in memory; a page needs five."""
IDLE_S = 60.0
"""Seconds that a connection may be without a complete request."""
TOO_MANY_PAGES = f"{MAX_PAGES} pages are open; close some of them"


class _Listener:
    """A listening socket for tornado. Without a descriptor for a connection it calls ``make_room``, and rests if that
    is of no use."""

    def __init__(self, sock: socket.socket, make_room: Callable[[], bool], rest: Callable[[], None]) -> None:
        self._sock, self._make_room, self._rest = sock, make_room, rest

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection; BlockingIOError: none now."""
        try:
            return self._sock.accept()
        except OSError as error:
            if error.errno not in NO_DESCRIPTOR_ERRORS:
                raise
            if not self._make_room():
                self._rest()
            raise BlockingIOError from None


class BoundedServer(HTTPServer):
    """An HTTP server that others cannot fill with connections."""

    def initialize(self, *args: Any, **options: Any) -> None:
        super().initialize(*args, idle_connection_timeout=IDLE_S, body_timeout=IDLE_S, **options)
        self._most = pending_limit(MAX_CONNECTIONS)
        self._streams: list[Any] = []
        """Connections that were no websockets when the last one came, the oldest first."""

    def add_sockets(self, sockets: list[socket.socket]) -> None:
        for sock in sockets:
            self._sockets[sock.fileno()] = sock
            self._accept_from(sock)

    def _accept_from(self, sock: socket.socket) -> None:
        listener = _Listener(sock, self._close_oldest, lambda: self._rest(sock))
        self._handlers[sock.fileno()] = add_accept_handler(listener, self._handle_connection)

    def _rest(self, sock: socket.socket) -> None:
        """Accepts nothing for a moment: the connection that has no descriptor stays in the queue."""
        self._handlers.pop(sock.fileno())()
        IOLoop.current().call_later(PAUSE_S, self._resume, sock)

    def _resume(self, sock: socket.socket) -> None:
        if not self._stopped:
            self._accept_from(sock)

    def handle_stream(self, stream: Any, address: Any) -> None:
        if len(self._connections) >= self._most:
            self._close_oldest()
        super().handle_stream(stream, address)
        self._streams.append(stream)

    def _close_oldest(self) -> bool:
        """Closes the connection that is open longest and no websocket; false: there is none."""
        http = {connection.stream for connection in self._connections}
        self._streams = [stream for stream in self._streams if stream in http and not stream.closed()]
        if not self._streams:
            return False
        self._streams.pop(0).close()
        return True


class Scripts(StaticHandler):
    """Bokeh's scripts, from memory.

    Tornado reads them piece by piece, and never ends a handler whose browser has gone meanwhile: its file would be open
    until Python's collector comes by.
    """

    @classmethod
    def get_content(cls, abspath: str, start: int | None = None, end: int | None = None) -> bytes:
        return _content(abspath)[start:end]


@functools.lru_cache(maxsize=MAX_SCRIPTS)
def _content(path: str) -> bytes:
    return Path(path).read_bytes()


class PageApplication(BokehTornado):
    """Bokeh's application with a bounded number of websockets, and with ``Scripts``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.add_handlers(".*", [("(?:/[^/]+)?/static/(.*)", Scripts)])  # before Bokeh's own, of each page

    def new_connection(self, *args: Any) -> Any:
        """Called for a websocket whose handshake is done; ProtocolError closes it."""
        if len(self._clients) >= MAX_PAGES:
            raise ProtocolError(TOO_MANY_PAGES)
        return super().new_connection(*args)
