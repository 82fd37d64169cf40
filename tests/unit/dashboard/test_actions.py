"""Actions from the page: a bounded queue, a confirmation, and who is an administrator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("bokeh", reason="the dashboard needs bokeh: pip install 'hoop[dashboard]'")

from bokeh.document import Document
from bokeh.events import ButtonClick

from hoop.dashboard.access import ADMIN, USER, AccessControl, Login
from hoop.dashboard.actions import MAX_WAITING, Action, ActionQueue
from hoop.dashboard.document import Page
from hoop.dashboard.view import ClusterView, DeviceState, DeviceView
from hoop.errors import FailedPrecondition
from hoop.wire.roles import Role
from hoop.wire.tokens import Token, new_token

WITHIN_S = 60.0


class RecordingActor:
    """Notes what it is asked to do. ``gate``: an action waits for it."""

    actions: tuple[Action, ...] = (Action.KILL, Action.ADD, Action.LEAVE)

    def __init__(self, confirm: bool = False) -> None:
        self.confirm = confirm
        self.done: list[tuple[Action, int]] = []
        self.gate = threading.Event()
        self.began = threading.Event()
        self.gate.set()

    def act(self, action: Action, device: int) -> str:
        self.began.set()
        assert self.gate.wait(WITHIN_S)
        if action is Action.LEAVE:
            raise FailedPrecondition("it is the last one")
        self.done.append((action, device))
        return f"{action} of {device}"

    def report(self) -> tuple[str, ...]:
        return ("<b>report</b>",)


class StoppingActor(RecordingActor):
    actions = (Action.KILL, Action.STOP, Action.CONTINUE)


@pytest.fixture
def queue_of() -> Iterator[Callable[[Any], ActionQueue]]:
    made: list[ActionQueue] = []

    def make(actor: Any) -> ActionQueue:
        made.append(ActionQueue(actor))
        return made[-1]

    yield make
    for one in made:
        one.actor.gate.set()  # type: ignore[attr-defined]
        one.close()


def wait_until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(WITHIN_S / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it did not happen")


def page(queue: ActionQueue) -> tuple[Page, Document]:
    devices = tuple(
        DeviceView(number, "a", "", 1, str(number), state)
        for number, state in ((1, DeviceState.TRAINING), (2, DeviceState.DEAD))
    )
    document = Document()
    return Page(document, lambda: ClusterView(devices=devices), actions=queue), document


def click(document: Document, name: str) -> None:
    (button,) = document.select({"name": name})
    button._trigger_event(ButtonClick(button))


def text(document: Document, name: str) -> str:
    (found,) = document.select({"name": name})
    return str(found.text)


def test_a_click_is_carried_out_and_its_outcome_shown(queue_of: Callable[[Any], ActionQueue]) -> None:
    actor = RecordingActor()
    queue = queue_of(actor)
    shown, document = page(queue)
    (chosen,) = document.select({"name": "action-device"})
    assert chosen.options == [("1", "device 1"), ("2", "device 2 (dead)")]
    chosen.value = "2"
    for name in ("action-kill", "action-add", "action-leave"):
        click(document, name)
    wait_until(lambda: len(queue.messages) == 3)
    assert actor.done == [(Action.KILL, 2), (Action.ADD, 0)]
    shown.update()
    found = text(document, "action-text")
    assert "kill of 2" in found
    assert "leave: it is the last one" in found
    assert "&lt;b&gt;report" in found


def test_the_menu_leaves_a_device_that_died_and_keeps_one_that_was_stopped_here(
    queue_of: Callable[[Any], ActionQueue],
) -> None:
    queue = queue_of(StoppingActor())
    states = {1: DeviceState.TRAINING, 2: DeviceState.TRAINING, 3: DeviceState.TRAINING}

    def read() -> ClusterView:
        return ClusterView(devices=tuple(DeviceView(one, "a", "", 1, str(one), state) for one, state in states.items()))

    document = Document()
    shown = Page(document, read, actions=queue)
    (chosen,) = document.select({"name": "action-device"})
    assert chosen.value == "1"
    states[1] = DeviceState.DEAD
    shown.update()
    assert chosen.value == "2", "the menu stayed on device 1 (dead)"
    click(document, "action-stop")
    states[2] = DeviceState.DEAD
    shown.update()
    assert chosen.value == "2", "it can be continued"
    chosen.value = "1"
    shown.update()
    assert chosen.value == "1", "a dead device can be chosen"


def test_with_confirmation_nothing_happens_before_it(queue_of: Callable[[Any], ActionQueue]) -> None:
    actor = RecordingActor(confirm=True)
    queue = queue_of(actor)
    _, document = page(queue)
    click(document, "action-confirm")
    click(document, "action-kill")
    assert "Really: kill, device 1?" in text(document, "action-question")
    click(document, "action-cancel")
    click(document, "action-confirm")
    assert not queue.messages
    click(document, "action-kill")
    click(document, "action-confirm")
    wait_until(lambda: bool(actor.done))
    assert actor.done == [(Action.KILL, 1)]
    click(document, "action-confirm")
    wait_until(lambda: len(queue.messages) == 1)
    assert actor.done == [(Action.KILL, 1)], "one confirmation is for one action"


def test_the_queue_is_bounded_and_takes_only_the_actors_actions(queue_of: Callable[[Any], ActionQueue]) -> None:
    actor = RecordingActor()
    queue = queue_of(actor)
    queue.submit(Action.SLOW, 1)
    assert "not possible here" in queue.messages[-1].text
    actor.gate.clear()
    queue.submit(Action.ADD, 0)
    assert actor.began.wait(WITHIN_S)
    for number in range(MAX_WAITING + 1):
        queue.submit(Action.KILL, number)
    assert "try again later" in queue.messages[-1].text
    actor.gate.set()
    wait_until(lambda: len(actor.done) == 1 + MAX_WAITING)


def test_a_page_without_actions_has_no_buttons_for_them() -> None:
    document = Document()
    Page(document, ClusterView)
    assert not list(document.select({"name": "action-text"}))


def test_administrators_are_those_with_the_join_token_or_the_printed_password() -> None:
    join = new_token()
    token = Token.parse(join)
    client, viewer = Token.parse(token.role_token(Role.CLIENT)), token.role_token("viewer")
    for login in (Login(token), Login(client), Login()):
        with_actions, without = (AccessControl(frozenset(), login, False, actions) for actions in (True, False))
        assert with_actions.cookie_for(login.admin_password) == ADMIN
        assert without.cookie_for(login.admin_password) is None
        assert with_actions.cookie_for(new_token()) is None
        assert with_actions.cookie_for("") is None
        assert login.admin_password not in repr(login)
    assert AccessControl(frozenset(), Login(token), False, True).cookie_for(join) == ADMIN
    assert AccessControl(frozenset(), Login(token), False, False).cookie_for(join) is None
    assert AccessControl(frozenset(), Login(token), False, True).cookie_for(viewer) == USER
    assert AccessControl(frozenset(), Login(client), False, True).cookie_for(join) is None
