"""The live web page of a cluster (``hoop dashboard``): one feed from the coordinator, drawn with Bokeh.

    view        what the page shows, as immutable values, and the pure functions that update them
    feed        the threads that poll and follow a coordinator
    document    the page of one browser; its tabs are the modules ``…_tab``
    tracer      records some steps of a job on request; ``simulator`` answers what-if questions
    actions     what a page may do: the demo's buttons, and an administrator's; ``action_bar`` has the buttons
    server      the web server: login, allowed origins, limits

Bokeh is needed only here: ``pip install 'hoop[dashboard]'``.

May import: wire transport client plan strategies.
"""

PUBLIC = ("access", "actions", "document", "feed", "server", "simulator", "tracer")
"""Modules that other rooms may import."""
