"""The models of the recipes: a model is an ordered list of blocks.

May import: nothing but the modules directly in hoop.
"""

from hoop.models.catalog import MODELS, build

__all__ = ["MODELS", "build"]

PUBLIC = ("catalog", "vision")
"""Modules that other rooms may import."""
