"""Launchers of a cluster on this machine.

``local`` starts devices as separate programs (``hoop up``); ``forked`` forks them for one job (``hoop train``).
``processes`` starts and ends Hoop commands as child processes.
"""
