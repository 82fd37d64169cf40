"""Who may see the page: allowed hosts and origins, the login beyond loopback, and headers of every answer.

Every request and every websocket passes ``AccessControl.check`` first. A request for another host name is refused (DNS
rebinding), Bokeh refuses a websocket of another origin, and without a valid cookie a page redirects to the login and a
websocket is refused. The cookie is signed with a key of this process, HttpOnly and SameSite=Strict.

Actions need an administrator's cookie: the page that has buttons, and its websocket, are below ``ADMIN_PATH``. A click
is a message on that websocket, which another site can neither open (origin, cookie) nor prepare: the handshake has the
signed token of a page that was loaded before.
"""

from __future__ import annotations

import hmac
import html
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from bokeh.server.auth_provider import AuthProvider
from bokeh.util.token import check_token_signature
from tornado.web import HTTPError, RequestHandler

from hoop.topology import Address
from hoop.wire.tokens import Token

COOKIE = "hoop_dashboard"
COOKIE_DAYS = 1.0
LOGIN_URL = "/login"
ADMIN_PATH = "/admin"
USER, ADMIN = b"user", b"admin"
"""Values of the cookie."""
MAX_TOKEN = 1024
"""Characters of a token that is compared."""
HEADERS = {
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    # Bokeh's scripts compile code (CustomJS), and its page has inline scripts and styles. Nothing comes from elsewhere.
    "Content-Security-Policy": "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
}
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Hoop: log in</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; margin: 10vh auto; max-width: 26em; padding: 0 1em; }}
input, button {{ font: inherit; width: 100%; box-sizing: border-box; margin: .4em 0; padding: .4em; }}
</style></head>
<body><h1>Hoop</h1><p role="alert">{problem}</p>
<form method="post"><label for="token">{label}</label>
<input id="token" name="token" type="password" autocomplete="current-password" required autofocus>
{xsrf}<button type="submit">Log in</button></form></body></html>
"""


@dataclass(frozen=True)
class Login:
    """How a user logs in: with a viewer's token of the cluster, or with a password that this process has made."""

    token: Token | None = None
    password: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    """Used where the cluster has no token that a user could type."""
    admin_password: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    """With actions: of administrators, beside the join token."""

    @property
    def label(self) -> str:
        if self.token is None:
            return "Password, which hoop dashboard has printed"
        return "Viewer's token of the cluster (hoop token FILE --role viewer)"

    def accepts(self, text: str) -> bool:
        """Whether this text is the token or the password. Compares in constant time."""
        text = text.strip()[:MAX_TOKEN]
        if self.token is None:
            return hmac.compare_digest(text.encode(), self.password.encode())
        return self.token.is_viewer(text)

    def accepts_admin(self, text: str) -> bool:
        """Whether this text is an administrator's: the join token of the cluster, or the printed password."""
        text = text.strip()[:MAX_TOKEN]
        if hmac.compare_digest(text.encode(), self.admin_password.encode()):
            return True
        return self.token is not None and self.token.is_join(text)


def allowed_hosts(address: Address, extra: Iterable[str] = ()) -> frozenset[str]:
    """The values of the headers Host and Origin (without scheme) that are accepted, in lower case.

    Those of the address that is listened on; for a wildcard address those of this machine's names and addresses.
    ``extra``: names under which a proxy shows the page, with the port if it is not the scheme's own.
    """
    names = {address.host}
    if address.is_loopback or address.is_wildcard:
        names |= {"localhost", "127.0.0.1"}
    if not address.is_loopback:
        names |= {socket.gethostname(), socket.getfqdn()}
    if address.is_wildcard:
        names.discard(address.host)
        try:
            found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        except OSError:
            found = []
        names |= {str(sockaddr[0]) for *_, sockaddr in found if "%" not in str(sockaddr[0])}
    return frozenset([*(str(Address(name, address.port)).lower() for name in names), *(one.lower() for one in extra)])


def _has_page_token(handler: Any) -> bool:
    """Whether a websocket has the signed token of a page. Bokeh reads a forged one before it checks the signature."""
    offered = handler.request.headers.get("Sec-WebSocket-Protocol", "").split(",")
    try:
        return len(offered) == 2 and check_token_signature(
            offered[1].strip(), handler.application.secret_key, signed=True
        )
    except Exception:  # whatever Bokeh meets in bytes that are not its own
        return False


class AccessControl(AuthProvider):
    """Checks every request of the Bokeh server."""

    def __init__(self, hosts: frozenset[str], login: Login | None, secure: bool, actions: bool = False) -> None:
        """``login`` None: none is needed. ``secure``: the page is served by HTTPS, and the cookie sent only so.

        ``actions``: there is a page for administrators.
        """
        self._hosts, self._login, self._secure, self._actions = hosts, login, secure, actions
        super().__init__()

    def cookie_for(self, text: str) -> bytes | None:
        """The cookie's value for what a user has typed; None: it is not accepted."""
        if self._login is None:
            return USER
        if self._actions and self._login.accepts_admin(text):
            return ADMIN
        return USER if self._login.accepts(text) else None

    @property
    def label(self) -> str:
        return self._login.label if self._login is not None else ""

    async def check(self, handler: Any) -> str | None:
        """The user of a request; None: the login is needed. Raises HTTPError for one that is refused."""
        for name, value in HEADERS.items():
            handler.set_header(name, value)
        if str(handler.request.host).lower() not in self._hosts:
            raise HTTPError(403, "the page is not served under this host name; see hoop dashboard --allow-origin")
        websocket = handler.request.headers.get("Upgrade", "").lower() == "websocket"
        if websocket and not _has_page_token(handler):
            raise HTTPError(403, "no token of a page of this dashboard; load the page again")
        if self._login is None:
            return "user"
        cookie = handler.get_signed_cookie(COOKIE, max_age_days=COOKIE_DAYS)
        path = str(handler.request.path)
        if path == ADMIN_PATH or path.startswith(f"{ADMIN_PATH}/"):
            if cookie == ADMIN:
                return "admin"
        elif cookie in (USER, ADMIN):
            return "user"
        if websocket:
            raise HTTPError(403, "log in first")
        return None

    @property
    def get_user(self) -> None:
        return None

    @property
    def get_user_async(self) -> Callable[[Any], Awaitable[str | None]]:
        return self.check

    @property
    def login_url(self) -> str:
        return LOGIN_URL

    @property
    def get_login_url(self) -> None:
        return None

    @property
    def logout_url(self) -> None:
        return None

    @property
    def logout_handler(self) -> None:
        return None

    @property
    def login_handler(self) -> type[RequestHandler]:
        access = self

        class LoginHandler(RequestHandler):
            """The login form."""

            async def prepare(self) -> None:
                self.current_user = await access.check(self)

            def get(self) -> None:
                self._show("")

            def post(self) -> None:
                value = access.cookie_for(self.get_body_argument("token", ""))
                if value is None:
                    self.set_status(403)
                    self._show("This is not it.")
                    return
                options = {"httponly": True, "samesite": "Strict", "secure": access._secure}
                self.set_signed_cookie(COOKIE, value, expires_days=COOKIE_DAYS, **options)
                self.redirect(ADMIN_PATH if value == ADMIN else "/")

            def _show(self, problem: str) -> None:
                shown = {"problem": html.escape(problem), "label": html.escape(access.label)}
                self.write(_PAGE.format(**shown, xsrf=self.xsrf_form_html()))

        return LoginHandler
