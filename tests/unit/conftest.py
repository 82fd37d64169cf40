"""Hypothesis examples have no deadline: a slow machine is not a failure."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("unit", deadline=None)
settings.load_profile("unit")
