"""The page of one browser: a headline, buttons for the tabs, and the tab that is shown.

A tab is made when it is first shown: all of them together take Bokeh a second to make, and the browser longer to build.
Twice a second the page takes the feed's newest view and sends what has changed in the tab that is shown, if anything
has. It does not send more while the browser has not applied the last ones: a browser that is slow, asleep or gone makes
no queue grow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from bokeh.document import Document
from bokeh.layouts import column, row
from bokeh.models import Button, CustomJS, LayoutDOM, Toggle
from bokeh.themes import Theme as BokehTheme

from hoop.dashboard.action_bar import ActionBar
from hoop.dashboard.actions import ActionQueue
from hoop.dashboard.cluster_tab import ClusterTab
from hoop.dashboard.events_tab import EventsTab
from hoop.dashboard.job_tab import JobTab
from hoop.dashboard.palette import DARK, LIGHT, Theme
from hoop.dashboard.parts import button_style, paragraph, set_text, text_block
from hoop.dashboard.plan_tab import PlanTab
from hoop.dashboard.simulator import Simulator
from hoop.dashboard.simulator_tab import SimulatorTab
from hoop.dashboard.timeline_tab import TimelineTab
from hoop.dashboard.tracer import Tracer
from hoop.dashboard.updates import PageUpdates
from hoop.dashboard.view import ClusterView

UPDATE_MS = 500

ReadView = Callable[[], ClusterView]

TEMPLATE = """
{% block preamble %}
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
  :root { --hoop-background: LIGHT.background; --hoop-panel: LIGHT.panel; --hoop-text: LIGHT.text;
          --hoop-muted: LIGHT.muted; --hoop-grid: LIGHT.grid; }
  :root.dark { --hoop-background: DARK.background; --hoop-panel: DARK.panel; --hoop-text: DARK.text;
               --hoop-muted: DARK.muted; --hoop-grid: DARK.grid; color-scheme: dark; }
  body { background: var(--hoop-background); color: var(--hoop-text); margin: 0 auto; padding: 0 8px;
         max-width: 1400px; font-family: system-ui, sans-serif; }
</style>
{% endblock %}
"""
"""Blocks of Bokeh's own page, with the colours; ``LIGHT.text`` and so on are replaced."""


@dataclass(frozen=True)
class PageTools:
    """What pages ask for, beside the view; all pages share them."""

    tracer: Tracer | None = None
    simulator: Simulator | None = None
    jobs_shown: Callable[[], None] = lambda: None
    """Called with every update of a tab that shows what jobs do: their events are to come often."""


class Tab(Protocol):
    """What the tabs have in common."""

    layout: LayoutDOM
    shows_jobs: bool
    """Whether it shows what the events of jobs tell."""

    def update(self, view: ClusterView) -> None:
        """Shows the view."""


def page_template() -> str:
    """``TEMPLATE`` with the colours of the themes."""
    text = TEMPLATE
    for name, theme in (("LIGHT", LIGHT), ("DARK", DARK)):
        for field in ("background", "panel", "text", "muted", "grid"):
            text = text.replace(f"{name}.{field}", getattr(theme, field))
    return text


def chart_theme(theme: Theme) -> BokehTheme:
    """The colours of charts."""
    text = {"text_color": theme.text}
    attributes: dict[str, Any] = {
        "Plot": {
            "background_fill_color": theme.panel,
            "border_fill_color": theme.background,
            "outline_line_color": theme.grid,
        },
        "Grid": {"grid_line_color": theme.grid},
        "Axis": {
            "major_label_text_color": theme.text,
            "axis_label_text_color": theme.text,
            "axis_line_color": theme.muted,
            "major_tick_line_color": theme.muted,
            "minor_tick_line_color": theme.muted,
        },
        "Title": text,
        "Legend": {"label_text_color": theme.text, "background_fill_color": theme.panel, "background_fill_alpha": 0.7},
    }
    return BokehTheme(json={"attrs": attributes})


class Page:
    """The page of one browser, in its Bokeh document."""

    def __init__(
        self,
        document: Document,
        read_view: ReadView,
        tools: PageTools | None = None,
        actions: ActionQueue | None = None,
        tab: str = "",
    ) -> None:
        """``tools``: the page has what they serve. ``actions``: it has buttons for them; None: it only shows.

        ``tab``: the one that is shown first, by its name in lower case; any other text: the first one.
        """
        self._document, self._read_view = document, read_view
        self._actions = ActionBar(actions) if actions is not None else None
        self._updates = PageUpdates()
        self._tools = tools or PageTools()
        self._makers = self._tab_makers()
        self._tabs: dict[str, Tab] = {}
        """Those that were shown, by name."""
        self._place = column(sizing_mode="stretch_width")
        """Has their layouts."""
        by_text = {name.lower(): name for name in self._makers}
        self._shown = by_text.get(tab, next(iter(self._makers)))
        self._head = text_block("headline")
        self._buttons = {
            name: Button(label=name, width=90, name=f"tab-{name}", stylesheets=[button_style()])
            for name in self._makers
        }
        self._dark = Toggle(label="Dark", width=70, name="dark", stylesheets=[button_style()])
        self._compose()

    def _tab_makers(self) -> dict[str, Callable[[], Tab]]:
        updates, tools = self._updates, self._tools
        found: dict[str, Callable[[], Tab]] = {
            "Cluster": lambda: ClusterTab(updates),
            "Job": lambda: JobTab(updates),
            "Timeline": lambda: TimelineTab(tools.tracer),
            "Events": EventsTab,
            "Plan": PlanTab,
        }
        simulator = tools.simulator
        if simulator is not None:
            found["Simulator"] = lambda: SimulatorTab(simulator)
        return found

    def _compose(self) -> None:
        for name, button in self._buttons.items():
            button.on_click(lambda name=name: self._choose(name))
            # So that the address can be kept and shared.
            button.js_on_click(
                CustomJS(args={"tab": name.lower()}, code="history.replaceState(null, '', `?tab=${tab}`)")
            )
        self._dark.on_change("active", lambda attr, old, new: self._change_theme())
        self._dark.js_on_change(
            "active", CustomJS(code="document.documentElement.classList.toggle('dark', this.active)")
        )
        # The page begins with the theme of the user's system.
        self._document.js_on_event(
            "document_ready",
            CustomJS(
                args={"dark": self._dark},
                code="if (matchMedia('(prefers-color-scheme: dark)').matches) { dark.active = true }",
            ),
        )
        self._updates.attach(self._document, self._head)
        buttons = row(*self._buttons.values(), self._dark, styles={"flex-wrap": "wrap"})
        view = self._read_view()
        self._show_headline(view)
        self._choose(self._shown)
        bar = []
        if self._actions is not None:
            self._actions.update(view)
            bar.append(self._actions.layout)
        document = self._document
        document.add_root(column(self._head, *bar, buttons, self._place, sizing_mode="stretch_width"))
        document.title = "Hoop"
        document.template = page_template()
        document.theme = chart_theme(LIGHT)
        document.add_periodic_callback(self.update, UPDATE_MS)

    def update(self) -> None:
        """Sends what has changed, unless the browser is behind."""
        if self._updates.behind:
            return
        view = self._read_view()
        self._update_tab(view)
        self._show_headline(view)
        if self._actions is not None:
            self._actions.update(view)
        self._updates.send()

    def _choose(self, name: str) -> None:
        """Shows one tab."""
        self._shown = name
        is_new = name not in self._tabs
        if is_new:
            self._tabs[name] = self._makers[name]()
        for other, button in self._buttons.items():
            button.button_type = "primary" if other == name else "default"
        for other, tab in self._tabs.items():
            tab.layout.visible = other == name
        self._update_tab(self._read_view())
        if is_new:
            self._place.children = [tab.layout for tab in self._tabs.values()]
        if self._updates.live:
            self._updates.send()

    def _update_tab(self, view: ClusterView) -> None:
        tab = self._tabs[self._shown]
        if tab.shows_jobs:
            self._tools.jobs_shown()
        tab.update(view)

    def _change_theme(self) -> None:
        self._document.theme = chart_theme(DARK if self._dark.active else LIGHT)

    def _show_headline(self, view: ClusterView) -> None:
        parts = [paragraph("Hoop dashboard", tag="h2")]
        if view.answered:
            parts.append(paragraph(f"Coordinator {view.coordinator}, process {view.pid}, Hoop {view.version}", "muted"))
        if view.problem:
            parts.append(
                paragraph(f"The coordinator does not answer; this is the last state: {view.problem}", "problem")
            )
        set_text(self._head, *parts)
