"""The live web page of a cluster (``hoop dashboard``): one feed from the coordinator, drawn with Bokeh.

    view        what the page shows, as immutable values, and the pure functions that update them
    feed        the threads that poll and follow a coordinator
    document    the page of one browser; its tabs are in ``cluster_tab``, ``job_tab``, ``timeline_tab``, ``events_tab``
    server      the web server: login, allowed origins, limits

Bokeh is needed only here: ``pip install 'hoop[dashboard]'``.

May import: wire client.
"""

PUBLIC = ("access", "feed", "server")
"""Modules that other rooms may import."""
