"""Models as ordered blocks: an ``nn.Sequential`` that may be cut into stages between any two of its children.

Each function in ``MODELS`` takes a seed and returns such a model; the initial weights depend on the seed alone. A block
has one input tensor and one output tensor, and a skip connection never leaves its block.
"""

from hoop.models.catalog import MODELS, build

__all__ = ["MODELS", "build"]
