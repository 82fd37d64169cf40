"""``hoop dashboard`` on a real cluster: the page over HTTP, a websocket session, a browser, and who is refused."""

from __future__ import annotations

import asyncio
import http.cookiejar
import itertools
import json
import os
import re
import shutil
import signal
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("bokeh", reason="the dashboard needs bokeh: pip install 'hoop[dashboard]'")

from bokeh.client import pull_session
from bokeh.document import Document
from bokeh.util.token import get_session_id
from tornado.ioloop import IOLoop

import hoop
from hoop.dashboard.server import DashboardConfig, DashboardServer
from hoop.dashboard.view import BufferView, ClusterView, DeviceState, DeviceView

if TYPE_CHECKING:
    from background import Running

    Start = Callable[..., Running]

UP = ("--devices", "3", "--memory", "64MiB")
WITHIN_S = 120.0
CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module", autouse=True)
def current_loop() -> Iterator[None]:
    """Bokeh's client makes the current event loop of this thread if there is none, and leaves it open."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()


def get(url: str, **headers: str) -> tuple[int, dict[str, str], str]:
    """Status, headers and text of an answer; a redirection is not followed."""
    parts = urllib.parse.urlsplit(url)
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=WITHIN_S)
    try:
        connection.request("GET", parts.path or "/", headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode(errors="replace")
    finally:
        connection.close()


def token_of(page: str) -> str:
    tokens: set[str] = set(re.findall(r'"token":"([\w.-]+)"', page))
    (token,) = tokens
    return token


def upgrade(url: str, token: str, **headers: str) -> int:
    """The status of the answer to a websocket's handshake; 101: it was accepted."""
    asked = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
        "Sec-WebSocket-Protocol": f"bokeh, {token}",
    }
    return get(f"{url}/ws", **asked, **headers)[0]


def document_of(url: str, monkeypatch: pytest.MonkeyPatch) -> Document:
    """The page's document, through a websocket session that is opened as a browser does: with the page's token."""
    token = token_of(get(url)[2])
    monkeypatch.setattr("bokeh.client.session.generate_jwt_token", lambda *_, **__: token)
    loop = IOLoop(make_current=False)
    try:
        session = pull_session(session_id=get_session_id(token), url=url, io_loop=loop)
        session.close()
        return session.document
    finally:
        asyncio_loop = loop.asyncio_loop
        asyncio_loop.run_until_complete(asyncio_loop.shutdown_default_executor())
        loop.close(all_fds=True)


def wait_for(url: str, monkeypatch: pytest.MonkeyPatch, expected: Callable[[Document], bool]) -> Document:
    """The page's document, once it is as expected."""
    deadline = time.monotonic() + WITHIN_S
    while not expected(document := document_of(url, monkeypatch)):
        assert time.monotonic() < deadline, f"the page still says {headline(document)}, {states(document)}"
    return document


def headline(document: Document) -> str:
    found: Any = document.get_model_by_name("headline")
    return str(found.text)


def states(document: Document) -> dict[int, str]:
    """By device, its state on the ring."""
    found: Any = document.get_model_by_name("ring")
    return dict(zip(found.data["device"], found.data["state"], strict=True))


def test_the_page_shows_the_devices_and_marks_a_killed_one_dead(
    up: Running, cluster: hoop.Cluster, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    dashboard = start("dashboard", "-c", up.address, "--port", 0)
    status, headers, page = get(dashboard.address)
    assert status == 200
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    scripts = re.findall(r'<(?:script|link)[^>]*(?:src|href)="([^"]+)"', page)
    assert scripts
    assert not [one for one in scripts if "://" in one], "the page needs no other server"
    script = get(f"{dashboard.address}/{scripts[0].lstrip('/')}")
    assert script[0] == 200
    found = wait_for(dashboard.address, monkeypatch, lambda document: len(states(document)) == 3)
    assert states(found) == {1: "standby", 2: "standby", 3: "standby"}
    (killed,) = [one.device.pid for one in cluster.status().devices if one.device.device_id == 2]
    os.kill(killed, signal.SIGKILL)
    found = wait_for(dashboard.address, monkeypatch, lambda document: states(document).get(2) == "dead")
    assert states(found) == {1: "standby", 2: "dead", 3: "standby"}
    dashboard.signal(signal.SIGTERM)
    assert dashboard.wait() == 143


def test_hoop_up_starts_and_ends_a_dashboard(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = start("up", "--devices", 1, "--memory", "4MiB", "--dashboard", 0)
    assert cluster.first_line.startswith("coordinator ")
    url = cluster.line().removeprefix("dashboard ")
    wait_for(url, monkeypatch, lambda document: states(document) == {1: "standby"})
    cluster.signal(signal.SIGTERM)
    assert cluster.wait() == 0
    with pytest.raises(ConnectionRefusedError):
        get(url)


def test_another_origin_and_another_host_are_refused(up: Running, start: Start) -> None:
    dashboard = start("dashboard", "-c", up.address, "--port", 0)
    url = dashboard.address
    token = token_of(get(url)[2])
    assert upgrade(url, token, Origin="http://evil.example") == 403
    assert upgrade(url, token, Origin=url) == 101
    assert get(url, Host="evil.example")[0] == 403
    assert "evil.example" in dashboard.errors, "the refusal is reported"


def test_beyond_loopback_the_page_asks_for_the_password(up: Running, start: Start) -> None:
    dashboard = start("dashboard", "-c", up.address, "--port", 0, "--host", "0.0.0.0")
    url = dashboard.address
    (password,) = re.findall(r"^password (\S+)$", dashboard.errors, re.MULTILINE)
    status, headers, page = get(url)
    assert (status, headers["Location"].partition("?")[0]) == (302, "/login")
    assert "token" not in page
    assert upgrade(url, "no-token", Origin=url) == 403
    jar = http.cookiejar.CookieJar()
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(jar))
    form = opener.open(f"{url}/login", timeout=WITHIN_S).read().decode()
    (xsrf,) = re.findall(r'name="_xsrf" value="([^"]+)"', form)

    def log_in(**fields: str) -> int:
        try:
            data = urllib.parse.urlencode(fields).encode()
            return int(opener.open(f"{url}/login", data, timeout=WITHIN_S).status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    assert log_in(token="wrong", _xsrf=xsrf) == 403
    assert log_in(token=password) == 403, "without the form's own value"
    assert not any(one.name == "hoop_dashboard" for one in jar)
    assert log_in(token=password, _xsrf=xsrf) == 200
    (cookie,) = [one for one in jar if one.name == "hoop_dashboard"]
    assert cookie.has_nonstandard_attr("HttpOnly")
    assert cookie.get_nonstandard_attr("SameSite") == "Strict"
    sent = f"{cookie.name}={cookie.value}"
    status, _, page = get(url, Cookie=sent)
    assert status == 200
    assert upgrade(url, token_of(page), Origin=url, Cookie=sent) == 101
    assert upgrade(url, token_of(page), Origin=url) == 403, "the page's token alone is not enough"
    assert get(url, Cookie=f"{cookie.name}=forged")[0] == 302


def test_the_page_says_that_the_coordinator_does_not_answer_and_goes_on_when_it_is_back(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    journal = ("--journal", tmp_path / "journal")
    first = start("coordinator", *journal)
    port = first.address.rpartition(":")[2]
    dashboard = start("dashboard", "-c", first.address, "--port", 0, "--json")
    url = json.loads(dashboard.first_line)["dashboard"]

    assert "does not answer" not in headline(document_of(url, monkeypatch))
    first.kill()
    wait_for(url, monkeypatch, lambda document: "does not answer" in headline(document))
    start("coordinator", *journal, "--port", port)
    wait_for(url, monkeypatch, lambda document: "does not answer" not in headline(document))


def test_without_bokeh_the_command_names_the_remedy(run_hoop: Callable[..., Any], tmp_path: Path, up: Running) -> None:
    (tmp_path / "bokeh.py").write_text("raise ModuleNotFoundError(\"No module named 'bokeh'\", name='bokeh')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run_hoop("dashboard", "-c", up.address, environment={"PYTHONPATH": path})
    assert done.returncode == 2
    assert "pip install 'hoop[dashboard]'" in done.stderr


# ---- in a browser


@pytest.fixture
def browser() -> Iterator[Any]:
    """Headless Chromium."""
    if CHROMIUM is None:
        pytest.skip("no chromium on the PATH")
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield started
        finally:
            started.close()


@pytest.fixture
def screenshots(tmp_path: Path) -> Path:
    """The folder in HOOP_SCREENSHOTS, or a temporary one."""
    return Path(os.environ.get("HOOP_SCREENSHOTS", tmp_path))


@pytest.mark.parametrize("width", [1280, 390])
def test_hostile_names_are_text_in_a_browser(browser: Any, screenshots: Path, width: int) -> None:
    """Names that are markup are shown as they are, in texts, tables and at the pointer."""
    hostile = "<img src=x onerror=document.title='owned'>"
    devices = tuple(
        DeviceView(
            number, f"{hostile}{number // 4}", hostile, 1, str(number), DeviceState.TRAINING, reason=hostile,
            used=2**20, capacity=2**24, buffers=(BufferView(hostile, 2**19),),
        )
        for number in range(8)
    )  # fmt: skip
    view = ClusterView(coordinator=hostile, answered=True, devices=devices, now=1.0)
    server = DashboardServer(lambda: view, DashboardConfig())
    try:
        server.start()
        page = browser.new_page(viewport={"width": width, "height": 900})
        problems: list[str] = []
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(server.url)
        page.get_by_text(f"Coordinator {hostile}").wait_for(timeout=1e3 * WITHIN_S)
        page.locator(".slick-cell", has_text=hostile).first.wait_for(timeout=1e3 * WITHIN_S)
        canvas = page.locator(".bk-Figure canvas").first.bounding_box()
        tooltip = page.locator(".bk-Tooltip", has_text=hostile)
        device_at_the_top = itertools.product(range(45, 60, 2), range(14, 28, 2)) if width > 1000 else ()
        for x, y in itertools.islice(itertools.cycle(device_at_the_top), 1000):
            page.mouse.move(canvas["x"] + canvas["width"] * x / 100, canvas["y"] + canvas["height"] * y / 100)
            if tooltip.count():
                break
        assert width < 1000 or tooltip.count(), "no text at the pointer"
        page.get_by_role("button", name="Dark").press("Enter")
        page.locator("html.dark").wait_for(timeout=1e3 * WITHIN_S)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "no scrolling to the side"
        page.screenshot(path=screenshots / f"dashboard-hostile-{width}.png", full_page=True)
        assert page.title() == "Hoop"
        assert page.locator("img[src=x]").count() == 0
        assert problems == []
    finally:
        server.close()


def test_a_browser_shows_a_killed_device_and_all_tabs(
    browser: Any, start: Start, connect: Callable[..., hoop.Cluster], screenshots: Path
) -> None:
    up = start("up", *UP)
    dashboard = start("dashboard", "-c", up.address, "--port", 0)
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(dashboard.address)
    page.get_by_text("3 devices on 1 host: 3 standby.").wait_for(timeout=1e3 * WITHIN_S)
    os.kill(connect(up.address).status().devices[0].device.pid, signal.SIGKILL)
    page.get_by_text("2 standby, 1 dead").wait_for(timeout=1e3 * WITHIN_S)
    page.screenshot(path=screenshots / "dashboard-cluster.png", full_page=True)
    for tab, text in (("Job", "No job"), ("Timeline", "is dead"), ("Events", "device_dead")):
        page.get_by_role("button", name=tab).click()
        page.get_by_text(text).first.wait_for(timeout=1e3 * WITHIN_S)
    assert problems == []
