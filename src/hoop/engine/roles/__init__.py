"""The roles of a rank in a job: see ``base.py`` for the list."""
