"""The buttons of a page that may act: a device to choose, one button an action, a confirmation, and what came of it."""

from __future__ import annotations

import time

from bokeh.layouts import column, row
from bokeh.models import Button, LayoutDOM, Select

from hoop.dashboard.actions import Action, ActionQueue
from hoop.dashboard.parts import button_style, input_style, paragraph, set_text, text_block
from hoop.dashboard.view import ClusterView

LABELS = {
    Action.KILL: ("Kill", "danger"),
    Action.STOP: ("Stop", "default"),
    Action.CONTINUE: ("Continue", "default"),
    Action.SLOW: ("Slow", "default"),
    Action.LEAVE: ("Leave", "default"),
    Action.ADD: ("Add a device", "primary"),
    Action.FINISH: ("Finish the job", "default"),
}
"""Text and kind of each button."""


class ActionBar:
    """The bar of one browser. Bokeh calls its handlers on the server's thread; they only put actions into the queue."""

    def __init__(self, queue: ActionQueue) -> None:
        self._queue = queue
        self._device = Select(title="Device", options=[], name="action-device", width=170, stylesheets=[input_style()])
        self._buttons = {
            action: Button(
                label=LABELS[action][0],
                button_type=LABELS[action][1],
                width=105,
                name=f"action-{action}",
                stylesheets=[button_style()],
            )
            for action in queue.actor.actions
        }
        for action, button in self._buttons.items():
            button.on_click(lambda action=action: self._clicked(action))
        self._was_alive: set[str] = set()
        """The devices that were alive at the last update."""
        self._stopped: set[str] = set()
        """Devices that were stopped here: they count as dead, and stay chosen to be continued."""
        self._asked: tuple[Action, int] | None = None
        self._question = text_block("action-question")
        self._yes = Button(label="Yes, do it", button_type="danger", width=105, name="action-confirm")
        self._no = Button(label="No", width=70, name="action-cancel", stylesheets=[button_style()])
        self._yes.on_click(self._confirmed)
        self._no.on_click(self._cancel)
        self._confirmation = row(
            self._question, self._yes, self._no, visible=False, sizing_mode="stretch_width",
            styles={"flex-wrap": "wrap"},
        )  # fmt: skip
        self._text = text_block("action-text")
        self.layout: LayoutDOM = column(
            row(
                self._device, *self._buttons.values(), sizing_mode="stretch_width",
                styles={"flex-wrap": "wrap", "align-items": "end"},
            ),
            self._confirmation,
            self._text,
            sizing_mode="stretch_width",
        )  # fmt: skip

    def update(self, view: ClusterView) -> None:
        """Shows the devices that there are, and what the last actions did."""
        options = [(str(one.id), f"device {one.id}") for one in view.devices if not one.state.is_gone]
        # One that was stopped counts as dead, and can be continued.
        options += [(str(one.id), f"device {one.id} ({one.state})") for one in view.devices if one.state.is_gone]
        if options != self._device.options:
            self._device.options = options
        alive = {str(device.id) for device in view.devices if not device.state.is_gone}
        gone = self._was_alive - alive - self._stopped
        self._was_alive = alive
        chosen = self._device.value
        if options and (chosen in gone or chosen not in [value for value, _ in options]):
            self._device.value = options[0][0]
        set_text(
            self._text,
            *(paragraph(text) for text in self._queue.actor.report()),
            *(
                paragraph(
                    f"{time.strftime('%H:%M:%S', time.localtime(one.time))} {one.text}",
                    "problem" if one.failed else "muted",
                )
                for one in reversed(self._queue.messages)
            ),
        )

    def _clicked(self, action: Action) -> None:
        chosen = str(self._device.value or "")
        device = int(chosen) if action.needs_device and chosen.isdecimal() else 0
        if action.needs_device and not device:
            return
        if not self._queue.actor.confirm:
            self._submit(action, device)
            return
        self._asked = action, device
        what = LABELS[action][0].lower()
        set_text(self._question, paragraph(f"Really: {what}{f', device {device}' if device else ''}?", "problem"))
        self._confirmation.visible = True

    def _confirmed(self) -> None:
        if self._asked is not None:
            self._submit(*self._asked)
        self._cancel()

    def _submit(self, action: Action, device: int) -> None:
        if action is Action.STOP:
            self._stopped.add(str(device))
        elif action in (Action.CONTINUE, Action.KILL):
            self._stopped.discard(str(device))
        self._queue.submit(action, device)

    def _cancel(self) -> None:
        self._asked = None
        self._confirmation.visible = False
