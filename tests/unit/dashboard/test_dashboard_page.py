"""The dashboard's page in a Bokeh document, without a server: escaping, filters, and browsers that are behind."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("bokeh", reason="the dashboard needs bokeh: pip install 'hoop[dashboard]'")

from bokeh.document import Document
from bokeh.models import Div

from hoop.dashboard import cluster_tab
from hoop.dashboard.access import Login, allowed_hosts
from hoop.dashboard.cluster_tab import ClusterTab, link_rows, memory_rows, ring_rows
from hoop.dashboard.curve import Curve
from hoop.dashboard.document import Page, PageTools
from hoop.dashboard.events_tab import ALL, MAX_ROWS, matching
from hoop.dashboard.job_tab import CURVES_S, MAX_CURVES_S, JobTab
from hoop.dashboard.job_view import JobView
from hoop.dashboard.marks import LogLine
from hoop.dashboard.parts import Source, paragraph, text_block
from hoop.dashboard.server import DashboardConfig
from hoop.dashboard.updates import MAX_UNACKNOWLEDGED, PageUpdates, to_json
from hoop.dashboard.view import GONE_S, BufferView, ClusterView, DeviceState, DeviceView
from hoop.errors import InvalidArgument
from hoop.topology import Address
from hoop.wire.roles import Role
from hoop.wire.tokens import Token, new_token

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"


def device(number: int, host: str = "a", state: DeviceState = DeviceState.TRAINING) -> DeviceView:
    return DeviceView(number, host, "127.0.0.1:1", 1, f"run-{number}", state, used=100, capacity=200)


def test_every_text_is_escaped() -> None:
    job = JobView(1, name=HOSTILE, status="running", reason=HOSTILE, notice=HOSTILE, strategy=HOSTILE, steps=3)
    view = ClusterView(coordinator=HOSTILE, version=HOSTILE, answered=True, problem=HOSTILE, jobs=(job,))
    document = Document()
    Page(document, lambda: view, tab="job")
    texts = [model.text for model in document.models if isinstance(model, Div)]
    assert sum("&lt;script&gt;" in text for text in texts) == 2, "the headline and the job's text"
    assert not any("<script" in text or "<img" in text for text in texts)
    assert all(model.disable_math for model in document.models if isinstance(model, Div))
    assert paragraph('"&') == '<p class="">&quot;&amp;</p>'


def sent(document: Document) -> tuple[int, list[list[str]], list[list[Any]]]:
    """The number of the last update, and the texts and sources that it changes."""
    updates: Any = document.select_one({"name": "updates"})
    number, text = updates.tags
    changes = json.loads(text)
    return number, changes["texts"], changes["sources"]


def test_a_browser_that_does_not_acknowledge_gets_no_more_updates() -> None:
    asked: list[None] = []

    def read() -> ClusterView:
        asked.append(None)
        return ClusterView(devices=tuple(device(number) for number in range(len(asked))))

    document = Document()
    page = Page(document, read)
    before = len(asked)
    for _ in range(50):
        page.update()
    assert len(asked) - before == MAX_UNACKNOWLEDGED
    (acknowledged,) = document.select({"name": "acknowledged"})
    acknowledged.tags = ["<script>"]
    page.update()
    assert len(asked) - before == MAX_UNACKNOWLEDGED, "a browser may send anything"
    acknowledged.tags = [MAX_UNACKNOWLEDGED]
    page.update()
    assert len(asked) - before == MAX_UNACKNOWLEDGED + 1


def test_a_browser_that_has_the_page_gets_one_message_an_update_with_what_has_changed() -> None:
    capacity = [200]

    def read() -> ClusterView:
        first = DeviceView(1, "a", "127.0.0.1:1", 1, "run-1", DeviceState.TRAINING, used=100, capacity=capacity[0])
        return ClusterView(devices=(first, device(2)))

    document = Document()
    page = Page(document, read)
    models = {name: document.select_one({"name": name}) for name in ("ring", "devices", "device-table")}
    acknowledged = document.select_one({"name": "acknowledged"})
    page.update()
    assert sent(document) == (1, [], []), "before the browser has the page the models are changed"
    acknowledged.tags = [1]
    messages: list[object] = []
    document.on_change(messages.append)
    page.update()
    assert not messages, "nothing has changed"
    capacity[0] = 300
    page.update()
    assert len(messages) == 1
    number, texts, sources = sent(document)
    assert (number, texts) == (2, [])
    changes = {name: rest for name, *rest in sources}
    assert set(changes) == {models["ring"].id, models["devices"].id}
    memory = ["100 B of 300 B", "100 B of 200 B"]
    columns, how = changes[models["ring"].id]
    assert (columns["memory"], how["drawn"], how["table"]) == (memory, False, ""), "at the pointer only: not drawn"
    columns, how = changes[models["devices"].id]
    assert (columns["memory"], how["drawn"], how["table"]) == (memory, True, models["device-table"].id)


def test_of_a_curve_that_has_grown_the_new_points_are_sent() -> None:
    updates, document, block = PageUpdates(), Document(), text_block("text")
    document.add_root(block)
    updates.attach(document, block)
    document.select_one({"name": "acknowledged"}).tags = [1]
    curve = Source("curve", "x", "y", updates=updates)

    def shown(x: list[int], y: list[float]) -> tuple[dict[str, list[float]], bool]:
        """The columns that are sent, and whether they are appended to those that the browser has."""
        curve.show_columns({"x": x, "y": y})
        updates.send()
        ((_, columns, how),) = sent(document)[2]
        return columns, how["appended"]

    assert shown([1, 2], [0.5, 0.4]) == ({"x": [1, 2], "y": [0.5, 0.4]}, False)
    assert shown([1, 2, 3], [0.5, 0.4, 0.3]) == ({"x": [3], "y": [0.3]}, True)
    curve.show_columns({"x": [1, 2, 3, 4], "y": [0.5, 0.4, 0.3, 0.2]})
    assert shown([1, 2, 3, 4, 5], [0.5, 0.4, 0.3, 0.2, 0.1]) == ({"x": [4, 5], "y": [0.2, 0.1]}, True)
    assert shown([2, 4], [0.45, 0.25]) == ({"x": [2, 4], "y": [0.45, 0.25]}, False), "points were merged"


def test_the_tab_of_the_cluster_is_not_made_again_for_what_it_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    def counted(devices: Sequence[DeviceView]) -> list[dict[str, Any]]:
        made.append(devices)
        return ring_rows(devices)

    monkeypatch.setattr(cluster_tab, "ring_rows", counted)
    trains = JobView(1, status="running", devices=(1, 2))
    dead = replace(device(3, state=DeviceState.DEAD), gone_at=1.0)
    view = ClusterView(devices=(device(1), device(2), dead), jobs=(trains,), now=2.0)
    tab = ClusterTab(PageUpdates())
    tab.update(view)
    silent = replace(device(1), silent_s=0.1)
    tab.update(replace(view, devices=(silent, *view.devices[1:]), jobs=(replace(trains, done=7),), now=3.0))
    assert len(made) == 1
    tab.update(replace(view, devices=(replace(silent, used=101), *view.devices[1:]), now=3.0))
    assert len(made) == 2
    tab.update(replace(view, now=1.0 + GONE_S))
    assert len(made) == 3, "the others close up"
    tab.update(replace(view, jobs=(replace(trains, status="ended"),), now=1.0 + GONE_S))
    assert len(made) == 4, "the lines of the job are gone"


def test_a_tab_that_shows_jobs_asks_for_their_events_with_every_update() -> None:
    asked: list[None] = []
    page = Page(Document(), ClusterView, PageTools(jobs_shown=lambda: asked.append(None)))
    page.update()
    assert not asked
    page._choose("Job")
    assert len(asked) == 1
    page.update()
    assert len(asked) == 2


def test_curves_are_drawn_less_often_than_the_text_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("hoop.dashboard.job_tab.time.monotonic", lambda: now[0])
    tab, points = JobTab(PageUpdates()), 3

    def shown(**changes: Any) -> tuple[int, str]:
        curve = Curve(tuple(range(points)), (1.0,) * points)
        tab.update(ClusterView(jobs=(JobView(1, status="running", steps=9, done=points, loss=curve, **changes),)))
        return len(tab._loss.model.data["x"]), tab._head.text

    assert shown()[0] == 3
    points = 4
    count, text = shown()
    assert count == 3
    assert "Step 4 of 9" in text
    now[0] += CURVES_S
    assert shown()[0] == 4
    points = 100
    now[0] += CURVES_S
    assert shown()[0] == 100
    points = 101
    now[0] += CURVES_S
    assert shown()[0] == 100, "a hundredth longer: it looks the same"
    now[0] += MAX_CURVES_S
    assert shown()[0] == 101


def names_in(document: Document) -> set[str]:
    return {str(model.name) for model in document.models if model.name}


def test_a_tab_is_made_when_it_is_first_shown_and_kept() -> None:
    """``tab`` is from the page's address, which may be anything."""
    document = Document()
    page = Page(document, ClusterView, tab="events")
    assert "ring" not in names_in(document)
    events = document.select_one({"name": "event-table"})
    page._choose("Cluster")
    page._choose("Job")
    assert {"ring", "job-text", "event-table"} <= names_in(document)
    assert not {"workers", "traffic", "loss"} & names_in(document), "no box without rows"
    assert [one.visible for one in page._place.children] == [False, False, True]
    page._choose("Events")
    assert document.select_one({"name": "event-table"}) is events
    assert [one.visible for one in page._place.children] == [True, False, False]
    unknown = Document()
    Page(unknown, ClusterView, tab=HOSTILE)
    assert "ring" in names_in(unknown)


def test_a_text_that_changes_often_is_sent_when_it_has_changed() -> None:
    updates, document, block = PageUpdates(), Document(), text_block("text")
    document.add_root(block)
    updates.attach(document, block)
    updates.change_text(block, "before")
    assert block.text == "before"
    document.select_one({"name": "acknowledged"}).tags = [1]
    for text in ("before", "during", "during", "after"):
        updates.change_text(block, text)
    updates.send()
    assert sent(document) == (1, [[block.id, "after"]], [])
    updates.send()
    assert sent(document)[0] == 1, "nothing has changed since"


def test_numbers_that_json_does_not_have_are_sent_as_null() -> None:
    text = to_json({"a": [1, 2.5, math.nan, "NaN"], "b": (math.inf,)})
    assert json.loads(text) == {"a": [1, 2.5, None, "NaN"], "b": [None]}


def test_a_ring_of_200_devices_is_one_small_message() -> None:
    rows = ring_rows([device(number, f"host-{number // 8}") for number in range(200)])
    assert len({(row["x"], row["y"]) for row in rows}) == 200
    assert len(json.dumps(rows)) < 100_000


def test_links_join_only_devices_that_are_there() -> None:
    job = JobView(1, status="running", devices=(1, 2, 3))
    dead = DeviceView(2, "a", "", 1, "run-2", DeviceState.DEAD, gone_at=1.0)
    view = ClusterView(devices=(device(1), dead, device(3)), jobs=(job,), now=2.0)
    assert len(view.on_ring) == 3
    assert len(link_rows(view)) == 2, "1 to 3 and back: the gap is closed"


def test_memory_without_a_name_is_shown_too() -> None:
    one = DeviceView(1, "a", "", 1, "", DeviceState.STANDBY, used=100, buffers=(BufferView("weights", 60),))
    assert [(row["name"], row["bytes"]) for row in memory_rows([one])] == [
        ("weights", "60 B (arena)"),
        ("unnamed", "40 B (arena)"),
    ]


def test_events_are_filtered_and_bounded() -> None:
    lines = [LogLine(float(number), "job 1", "lost", f"Device {number}") for number in range(2 * MAX_ROWS)]
    lines.append(LogLine(0.0, "coordinator", "device_dead", "device 7 is dead"))
    assert len(matching(lines, "", ALL)) == MAX_ROWS
    assert [one.text for one in matching(lines, "DEAD device", ALL)] == ["device 7 is dead"]
    assert matching(lines, "dead", "job 1") == []


def test_the_login_takes_the_viewers_token_and_no_other() -> None:
    join = new_token()
    token = Token.parse(join)
    viewer, client = token.role_token("viewer"), token.role_token(Role.CLIENT)
    for known in (token, Token.parse(client)):
        login = Login(known)
        assert login.accepts(f" {viewer}\n")
        assert not any(login.accepts(text) for text in ("", "x", join, login.password, client, viewer[:-1], "ä" * 5000))
    password = Login()
    assert password.accepts(password.password)
    assert not password.accepts("")
    assert password.password not in repr(password)


def test_beyond_loopback_the_page_needs_a_login() -> None:
    with pytest.raises(InvalidArgument, match="needs a login"):
        DashboardConfig("0.0.0.0", 1)
    assert DashboardConfig("0.0.0.0", 1, Login()).login is not None
    with pytest.raises(InvalidArgument, match="both"):
        DashboardConfig(certificate=__file__)  # type: ignore[arg-type]


def test_hosts_that_are_allowed() -> None:
    loopback = allowed_hosts(Address("127.0.0.1", 80), ["Proxy.example"])
    assert loopback == {"127.0.0.1:80", "localhost:80", "proxy.example"}
    assert "0.0.0.0:80" not in allowed_hosts(Address("0.0.0.0", 80))
