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
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("bokeh", reason="the dashboard needs bokeh: pip install 'hoop[dashboard]'")

from bokeh.client import pull_session
from bokeh.core.serialization import Deserializer
from bokeh.document import Document
from bokeh.util.token import get_session_id
from free_ports import free_port
from tornado.ioloop import IOLoop

import hoop
from hoop.dashboard import document as document_module
from hoop.dashboard.cluster_tab import traffic
from hoop.dashboard.job_view import JobView
from hoop.dashboard.server import DashboardConfig, DashboardServer
from hoop.dashboard.tracer import Tracer
from hoop.dashboard.view import BufferView, ClusterView, DeviceState, DeviceView, with_status
from hoop.errors import InvalidArgument

if TYPE_CHECKING:
    from background import Running

    Start = Callable[..., Running]

Models = dict[str, dict[str, Any]]
"""By name, the attributes of a model of the page."""
UP = ("--devices", "3", "--memory", "64MiB")
WITHIN_S = 120.0
ENDLESS = ("--epochs", 100_000, "--json", "--set", "slowdown=[20, 20]")
"""Options of a run that is stopped. Its devices sleep most of the time: the page needs the cores."""


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
        connection.request("GET", f"{parts.path or '/'}?{parts.query}", headers=headers)
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


def first_frame(url: str, token: str, **headers: str) -> int:
    """The first byte of the first frame on an accepted websocket: 0x81 is a message, 0x88 closes it; 0: its end."""
    place = urllib.parse.urlsplit(f"{url}/ws")
    lines = [
        f"GET {place.path} HTTP/1.1",
        f"Host: {place.netloc}",
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
        f"Sec-WebSocket-Protocol: bokeh, {token}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    with socket.create_connection((place.hostname, place.port), WITHIN_S) as sock:
        sock.sendall("\r\n".join([*lines, "", ""]).encode())
        with sock.makefile("rb") as answer:
            while answer.readline() not in (b"\r\n", b""):
                pass
            return int.from_bytes(answer.read(1), "big")


def document_of(url: str, monkeypatch: pytest.MonkeyPatch, tab: str = "") -> Document:
    """The page's document, through a websocket session that is opened as a browser does: with the page's token."""
    token = token_of(get(f"{url}/?tab={tab}" if tab else url)[2])
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


def models_of(url: str, monkeypatch: pytest.MonkeyPatch, tab: str = "") -> Models:
    """The models of the page that have a name. Only their data is decoded: to make them all takes long."""
    sent: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(Document, "replace_with_json", lambda _, json: sent.append(json))
        document_of(url, monkeypatch, tab)
    (page,) = sent
    return {
        str(one["name"]): {**one, "data": Deserializer().decode(one["data"], page.buffers)} if "data" in one else one
        for one in attributes_in(page.content)
        if "name" in one
    }


def attributes_in(value: Any) -> Iterator[dict[str, Any]]:
    """Those of every model in a page's JSON."""
    if isinstance(value, dict):
        if "attributes" in value:
            yield value["attributes"]
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from attributes_in(one)


def wait_for(url: str, monkeypatch: pytest.MonkeyPatch, expected: Callable[[Models], bool], tab: str = "") -> Models:
    """The models of the page with this tab, once they are as expected."""
    deadline = time.monotonic() + WITHIN_S
    while not expected(models := models_of(url, monkeypatch, tab)):
        assert time.monotonic() < deadline, f"the page still says {headline(models)}, and has {sorted(models)}"
        threading.Event().wait(document_module.UPDATE_MS / 1e3)
    return models


def headline(models: Models) -> str:
    return str(models["headline"]["text"])


def states(models: Models) -> dict[int, str]:
    """By device, its state on the ring."""
    return dict(zip(column(models, "ring", "device"), column(models, "ring", "state"), strict=True))


def column(models: Models, source: str, name: str) -> list[Any]:
    """A column of one of the page's data sources. The page has none of a table or chart without rows."""
    return list(models[source]["data"][name]) if source in models else []


def test_the_page_shows_the_devices_and_marks_a_killed_one_dead(
    up: Running,
    cluster: hoop.Cluster,
    start: Start,
    await_event: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dashboard = start("dashboard", "-c", up.address, "--port", 0)
    status, headers, page = get(dashboard.address)
    assert status == 200
    assert "every user of this machine can open the page; with --login it asks for a token" in dashboard.errors
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    scripts = re.findall(r'<(?:script|link)[^>]*(?:src|href)="([^"]+)"', page)
    assert scripts
    assert not [one for one in scripts if "://" in one], "the page needs no other server"
    script = get(f"{dashboard.address}/{scripts[0].lstrip('/')}")
    assert script[0] == 200
    standby = {1: "standby", 2: "standby", 3: "standby"}
    wait_for(dashboard.address, monkeypatch, lambda models: states(models) == standby)
    (killed,) = [one.device.pid for one in cluster.status().devices if one.device.device_id == 2]
    os.kill(killed, signal.SIGKILL)
    await_event(up.address, "device_dead", device=2)
    wait_for(dashboard.address, monkeypatch, lambda models: states(models) == {**standby, 2: "dead"})
    dashboard.signal(signal.SIGTERM)
    assert dashboard.wait() == 143


def test_another_origin_and_another_host_are_refused(up: Running, start: Start) -> None:
    dashboard = start("dashboard", "-c", up.address, "--port", 0)
    url = dashboard.address
    token = token_of(get(url)[2])
    assert upgrade(url, token, Origin="http://evil.example") == 403
    assert upgrade(url, token, Origin=url) == 101
    assert get(url, Host="evil.example")[0] == 403
    dashboard.wait_for_error("evil.example")  # the refusal is reported


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


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """PEM files of a certificate for 127.0.0.1 that signs itself, and of its key."""
    if shutil.which("openssl") is None:
        pytest.skip("a certificate needs the openssl command")
    paths = tmp_path / "dashboard.pem", tmp_path / "dashboard.key"
    kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=hoop", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-out", str(paths[0]), "-keyout", str(paths[1])]
    command = ["openssl", "req", *kind, *names, *files]
    subprocess.run(command, check=True, capture_output=True, timeout=WITHIN_S)
    return paths


def test_with_a_certificate_the_page_is_served_by_https_alone(
    up: Running, start: Start, certificate: tuple[Path, Path]
) -> None:
    path, key = certificate
    options = ("--port", 0, "--login", "--certificate", path, "--key", key)
    dashboard = start("dashboard", "-c", up.address, *options)
    url = urllib.parse.urlsplit(dashboard.address)
    assert url.scheme == "https"
    connection = HTTPSConnection(
        url.hostname or "", url.port, timeout=WITHIN_S, context=ssl.create_default_context(cafile=str(path))
    )
    try:
        connection.request("GET", "/login")
        answer = connection.getresponse()
        page = answer.read().decode()
        assert (answer.status, 'name="_xsrf"' in page) == (200, True)
        cookie = answer.getheader("Set-Cookie") or ""
        assert "Secure" in cookie
        assert "SameSite=Strict" in cookie
    finally:
        connection.close()
    with pytest.raises((HTTPException, OSError)):
        get(dashboard.address.replace("https", "http"))


def test_a_certificate_without_its_key_is_refused(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    path, key = certificate
    with pytest.raises(InvalidArgument, match="give both of them for HTTPS"):
        DashboardConfig(certificate=path)
    with pytest.raises(InvalidArgument, match="PEM files that belong together"):
        DashboardServer(ClusterView, DashboardConfig(certificate=path, key=path))
    with pytest.raises(InvalidArgument, match="No such file"):
        DashboardServer(ClusterView, DashboardConfig(certificate=tmp_path / "none", key=key))


def test_the_page_says_that_the_coordinator_does_not_answer_and_goes_on_when_it_is_back(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    journal = ("--journal", tmp_path / "journal")
    first = start("coordinator", *journal)
    port = first.address.rpartition(":")[2]
    dashboard = start("dashboard", "-c", first.address, "--port", 0, "--json")
    url = json.loads(dashboard.first_line)["dashboard"]

    shown: Any = document_of(url, monkeypatch).get_model_by_name("headline")
    assert "does not answer" not in shown.text
    first.kill()
    wait_for(url, monkeypatch, lambda models: "does not answer" in headline(models))
    start("coordinator", *journal, "--port", port)
    wait_for(url, monkeypatch, lambda models: "does not answer" not in headline(models))


def test_the_page_of_hoop_up_shows_each_devices_time_shards_and_bytes_while_a_job_trains(
    start: Start, connect: Callable[..., hoop.Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``hoop up`` starts the dashboard, and ends it."""
    up = start("up", "--devices", 2, "--memory", "64MiB", "--dashboard", 0)
    assert up.first_line.startswith("coordinator ")
    url = up.line().removeprefix("dashboard ")
    job = start("train", "mnist", "-c", up.address, *ENDLESS, "--shards", 6)

    def has_each_shard_once(models: Models) -> bool:
        """Not while the load balancer moves one: the devices' heartbeats come one after the other."""
        shards = [one for text in column(models, "workers", "shards") for one in shard_numbers(text)]
        times = [*column(models, "work", "forward"), *column(models, "work", "backward")]
        return len(times) == 4 and min(times) > 0 and sorted(shards) == list(range(6))

    found = wait_for(url, monkeypatch, has_each_shard_once, tab="job")
    assert column(found, "work", "device") == ["device 1 (rank 0)", "device 2 (rank 1)"]
    # The rate is that of the last seconds, in which a busy machine may have made no step.
    wait_for(
        url, monkeypatch, lambda models: any(not rate.startswith("0 B") for rate in column(models, "traffic", "rate"))
    )
    wait_for(url, monkeypatch, lambda models: "0F0" in column(models, "plan", "text"), tab="plan")
    trace = Tracer(lambda: connect(up.address))
    trace.ask(1, [1, 2])
    deadline = time.monotonic() + WITHIN_S
    while trace.busy and time.monotonic() < deadline:
        trace.close()
    assert not trace.trace.problem
    assert {(one.device, one.rank) for one in trace.trace.spans} == {(1, 0), (2, 1)}
    assert {"forward", "backward", "reduce", "update"} <= {one.category for one in trace.trace.spans}
    job.signal(signal.SIGTERM)
    job.wait(WITHIN_S)
    up.signal(signal.SIGTERM)
    assert up.wait() == 0
    with pytest.raises(ConnectionRefusedError):
        get(url)


def shard_numbers(text: str) -> list[int]:
    """The numbers of a text like ``0-3, 8``; none of ``none``."""
    pairs = [one.partition("-") for one in text.split(", ") if one != "none"]
    return [number for low, _, high in pairs for number in range(int(low), int(high or low) + 1)]


def test_links_over_tcp_have_their_bytes(start: Start, connect: Callable[..., hoop.Cluster]) -> None:
    coordinator = start("coordinator")
    for _ in range(2):
        port = free_port()
        # With an advertised address a device shares no memory with others.
        data = ("--data-port", port, "--advertise-data", f"127.0.0.1:{port}")
        assert start("device", "--join", coordinator.address, "--memory", "64MiB", *data).first_line
    job = start("train", "mnist", "-c", coordinator.address, *ENDLESS)
    cluster = connect(coordinator.address)
    deadline = time.monotonic() + WITHIN_S
    view = ClusterView()
    while len(found := traffic(view)) < 2 or not all(one.sent > 1000 for one in found):
        assert time.monotonic() < deadline, "no link with bytes"
        threading.Event().wait(document_module.UPDATE_MS / 1e3)
        view = with_status(view, cluster.status(), time.monotonic())
    assert {(one.device, one.peer) for one in found} == {(1, 2), (2, 1)}
    job.signal(signal.SIGTERM)
    job.wait(WITHIN_S)


def test_hoop_train_shows_its_run(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start("train", "mnist", "--devices", 2, "--memory", "64MiB", *ENDLESS, "--dashboard", 0)
    deadline = time.monotonic() + WITHIN_S
    while not (found := re.findall(r"^dashboard (\S+)$", run.errors, re.MULTILINE)):
        assert time.monotonic() < deadline, run.errors
        time.sleep(0.05)
    wait_for(found[0], monkeypatch, lambda models: set(states(models).values()) == {"training"})
    run.signal(signal.SIGTERM)
    assert run.wait(WITHIN_S) == 143
    with pytest.raises(ConnectionRefusedError):
        get(found[0])


def test_actions_need_an_administrators_login(up: Running, start: Start) -> None:
    dashboard = start("dashboard", "-c", up.address, "--port", 0, "--actions", "--json")
    shown = json.loads(dashboard.first_line)
    url, admin = shown["dashboard"], shown["admin"]
    assert get(url)[0] == 302, "a login is needed on loopback too"
    jar = http.cookiejar.CookieJar()
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(jar))

    def log_in(secret: str) -> str:
        """The cookie of a login with this text."""
        jar.clear()
        form = opener.open(f"{url}/login", timeout=WITHIN_S).read().decode()
        (xsrf,) = re.findall(r'name="_xsrf" value="([^"]+)"', form)
        data = urllib.parse.urlencode({"token": secret, "_xsrf": xsrf}).encode()
        opener.open(f"{url}/login", data, timeout=WITHIN_S).close()
        (cookie,) = [one for one in jar if one.name == "hoop_dashboard"]
        return f"{cookie.name}={cookie.value}"

    client = log_in(shown["password"])
    status, _, page = get(url, Cookie=client)
    assert status == 200
    assert get(admin, Cookie=client)[0] == 302, "this password only shows"
    page_token = token_of(page)
    assert upgrade(admin, page_token, Origin=url, Cookie=client) == 403
    administrator = log_in(shown["admin_password"])
    status, _, page = get(admin, Cookie=administrator)
    assert status == 200
    page_token = token_of(page)
    assert upgrade(admin, page_token, Origin=url, Cookie=administrator) == 101
    assert upgrade(admin, page_token, Origin="http://evil.example", Cookie=administrator) == 403
    assert upgrade(admin, page_token, Origin=url) == 403
    assert first_frame(admin, page_token, Origin=url, Cookie=administrator) == 0x81
    for forged in (
        f"{page_token[:-8]}AAAAAAAA",
        "x",
        "x.y",
        "a" * 2000 + ".y",
        f"{page_token.partition('.')[0]}.z",
        "",
    ):
        assert upgrade(admin, forged, Origin=url, Cookie=administrator) == 403, forged
    assert "Traceback" not in dashboard.errors


def test_without_bokeh_the_command_names_the_remedy(run_hoop: Callable[..., Any], tmp_path: Path, up: Running) -> None:
    (tmp_path / "bokeh.py").write_text("raise ModuleNotFoundError(\"No module named 'bokeh'\", name='bokeh')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run_hoop("dashboard", "-c", up.address, environment={"PYTHONPATH": path})
    assert done.returncode == 2
    assert "pip install 'hoop[dashboard]'" in done.stderr


# ---- in a browser


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
    job = JobView(1, hostile, tuple(range(8)), "running", strategy="data", batch_size=64, num_microbatches=8)
    view = ClusterView(coordinator=hostile, answered=True, devices=devices, jobs=(job,), now=1.0)
    server = DashboardServer(lambda: view, DashboardConfig())
    try:
        server.start()
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme="dark")
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
        page.locator("html.dark").wait_for(timeout=1e3 * WITHIN_S)  # as the system
        page.get_by_role("button", name="Dark").press("Enter")
        page.locator("html:not(.dark)").wait_for(timeout=1e3 * WITHIN_S)
        for tab, heading in (("Job", f"Job 1: {hostile}"), ("Plan", "Plan"), ("Cluster", "Cluster")):
            page.get_by_role("button", name=tab, exact=True).click()
            page.get_by_role("heading", name=heading, exact=True).wait_for(timeout=1e3 * WITHIN_S)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{tab}: no scrolling to the side"
        page.screenshot(path=screenshots / f"dashboard-hostile-{width}.png", full_page=True)
        assert page.title() == "Hoop"
        assert page.locator("img[src=x]").count() == 0
        assert problems == []
    finally:
        server.close()


def test_a_page_that_loads_slowly_is_updated_afterwards(browser: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """More updates are sent before the browser has the page than it may leave unacknowledged."""
    monkeypatch.setattr(document_module, "UPDATE_MS", 5)
    numbers = itertools.count()
    server = DashboardServer(lambda: ClusterView(f"number {next(numbers)}.", answered=True), DashboardConfig())
    try:
        server.start()
        page = browser.new_page()
        page.set_default_timeout(1e3 * WITHIN_S)
        page.goto(server.url)
        shown = page.get_by_text("Coordinator number ")
        first = int(re.findall(r"number (\d+)", shown.inner_text())[0])
        page.get_by_text(re.compile(rf"number (?!{first}\.)")).wait_for()
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
    page.locator(".slick-row", has_text="dead").wait_for(timeout=1e3 * WITHIN_S)  # in the table, too
    page.screenshot(path=screenshots / "dashboard-cluster.png", full_page=True)
    for tab, text in (("Job", "No job"), ("Timeline", "is dead"), ("Events", "device_dead")):
        page.get_by_role("button", name=tab).click()
        page.get_by_text(text).first.wait_for(timeout=1e3 * WITHIN_S)
    assert problems == []


def test_a_browser_shows_a_job_that_survives_a_kill_its_plan_a_trace_and_the_simulator(
    browser: Any, start: Start, connect: Callable[..., hoop.Cluster], screenshots: Path
) -> None:
    up = start("up", *UP, "--dashboard", 0)
    assert up.first_line
    url = up.line().removeprefix("dashboard ")
    start("train", "mnist", "-c", up.address, "--epochs", 100_000, "--json")
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(1e3 * WITHIN_S)
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(url)
    page.get_by_text("3 devices on 1 host: 3 training.").wait_for()

    def show(tab: str) -> None:
        page.get_by_role("button", name=tab, exact=True).click()

    show("Job")
    page.get_by_text("A step takes").wait_for()
    page.wait_for_function("Bokeh.documents[0].get_model_by_name('work')?.data.device.length == 3")
    page.locator(".slick-row", has_text=re.compile(r"\d ms")).first.wait_for()
    os.kill(connect(up.address).status().devices[2].device.pid, signal.SIGKILL)
    page.get_by_text(re.compile(r"recover(y|ies); the last pause took")).wait_for()
    done = int(re.findall(r"Step (\d+)", page.get_by_text("Step ").first.inner_text())[0])
    page.wait_for_function(
        "done => Bokeh.documents[0].get_model_by_name('loss')?.data.x.some(step => step > done + 5)", arg=done
    )
    page.screenshot(path=screenshots / "dashboard-job.png", full_page=True)
    show("Plan")
    page.get_by_text("on 2 devices").wait_for()
    show("Timeline")
    page.get_by_role("button", name="Trace the next steps").click()
    page.get_by_text("instructions on 2 devices").wait_for()
    page.screenshot(path=screenshots / "dashboard-timeline.png", full_page=True)
    show("Simulator")
    page.get_by_label("Strategy").select_option("ps:bsp")
    page.get_by_role("button", name="Simulate", exact=True).click()
    page.get_by_text("ps:bsp on 8 devices, 4 a host, 1 Gbit/s, 0.5 ms: a step takes").wait_for()
    page.screenshot(path=screenshots / "dashboard-simulator.png", full_page=True)
    assert problems == []


def test_a_browser_keeps_tables_outside_the_viewport_up_to_date_without_warnings(
    browser: Any, start: Start, connect: Callable[..., hoop.Cluster]
) -> None:
    """A table below the viewport kept the bytes a second of a dead device, and never had those of a new one."""
    up = start("up", *UP)
    start("train", "mnist", "-c", up.address, "-n", "3:4", *ENDLESS)
    dashboard = start("dashboard", "-c", up.address, "--port", 0)
    page = browser.new_page(viewport={"width": 1280, "height": 600}, color_scheme="dark")
    page.set_default_timeout(1e3 * WITHIN_S)
    problems: list[str] = []
    page.on("console", lambda one: problems.append(one.text) if one.type in ("warning", "error") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(dashboard.address)

    def sends(device: int) -> Any:
        return page.locator(".slick-row", has_text=f"device {device}all ranks")

    sends(3).wait_for(state="attached")
    for tab in ("Job", "Timeline", "Cluster"):
        page.get_by_role("button", name=tab, exact=True).click()
    (killed,) = [one.device.pid for one in connect(up.address).status().devices if one.device.device_id == 3]
    os.kill(killed, signal.SIGKILL)
    sends(3).wait_for(state="detached")
    start("device", "--join", up.address, "--memory", "64MiB")
    sends(4).wait_for(state="attached")
    white = "element => getComputedStyle(element).backgroundColor"
    assert page.get_by_role("button", name="Job", exact=True).evaluate(white) != "rgb(255, 255, 255)"
    assert problems == []


def test_a_browser_on_another_host_logs_in_and_sees_a_device_die(
    browser_elsewhere: tuple[Any, str], start: Start, connect: Callable[..., hoop.Cluster]
) -> None:
    browser, address = browser_elsewhere
    up = start("up", *UP)
    dashboard = start("dashboard", "-c", up.address, "--port", 0, "--host", address)
    assert f"http://{address}:" in dashboard.address
    (password,) = re.findall(r"^password (\S+)$", dashboard.errors, re.MULTILINE)
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(1e3 * WITHIN_S)
    page.goto(dashboard.address)
    page.locator("input[name=token]").fill(password)
    page.keyboard.press("Enter")
    page.get_by_text("3 devices on 1 host: 3 standby.").wait_for()
    os.kill(connect(up.address).status().devices[0].device.pid, signal.SIGKILL)
    page.get_by_text("2 standby, 1 dead").wait_for()
