"""``python -m hoop`` is ``hoop``.

Python puts the current folder first in the import path here: a file ``grpc.py`` in it would be run as gRPC.
"""

import os
import sys

_SOURCE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()] != [_SOURCE]:
    del sys.path[0]

from hoop.cli.main import main  # noqa: E402 - the line above must come before every other import

main()
