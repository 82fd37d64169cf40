"""The ``torch.distributed`` backend ``hoop``. ``autoload`` registers it; PyTorch calls ``process_group``.

May import: memory transport collectives.
"""

PUBLIC = ("autoload",)
"""Modules that other rooms may import."""
