"""``python -m hoop`` is ``hoop``."""

from hoop.cli.main import main

main()
