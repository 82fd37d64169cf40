"""Models as ordered blocks: an ``nn.Sequential`` that may be cut between any two of its children.

Every function here takes a seed and returns such a model; its weights are a function of that seed alone.
A block has one tensor in and one out, and a skip connection never leaves its block. ``MODELS`` is the list.
"""

from hoop.models.catalog import MODELS, build

__all__ = ["MODELS", "build"]
