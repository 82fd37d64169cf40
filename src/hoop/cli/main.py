"""``hoop``: the entry point of the command line, and its exit codes.

Exit codes: 0 done · 1 a bug, an audit that does not hold, or a problem that ``hoop doctor`` found · 2 a mistake in what
was asked · 3 a peer failed or did not answer · 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP. ``hoop run`` ends with the code of
the failed rank.

Nothing is imported here that takes time: a Ctrl-C during an import outside of ``main`` would end in a traceback.
"""

from __future__ import annotations

import os
import sys

from hoop.errors import HoopError, exit_code


def main() -> None:
    """The entry point."""
    # gRPC's own log repeats what a peer sent, escape characters included. Errors come back with the call.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        _run()
    except KeyboardInterrupt:
        sys.exit(130)


def _run() -> None:
    from hoop.cli.commands import command_line, completed_words, with_default_port
    from hoop.cli.output import echo
    from hoop.cli.running import end_by_signals

    end_by_signals()
    try:
        command_line(completed_words() or sys.argv[1:])(args=with_default_port(sys.argv[1:]))
    except HoopError as error:
        echo(f"hoop: {error}", err=True)
        sys.exit(exit_code(error))
    except OSError as error:
        if error.filename is None:
            raise
        echo(f"hoop: {error.filename}: {error.strerror}", err=True)  # a path that was given
        sys.exit(2)
