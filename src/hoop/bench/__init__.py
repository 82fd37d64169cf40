"""Hoop beside its rivals, in one run: the same collective, sizes and ranks, as a ratio."""
