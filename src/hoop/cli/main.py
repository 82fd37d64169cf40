"""``hoop``: the entry point of the command line, and its exit codes.

Exit codes: 0 done · 1 a bug, an audit that does not hold, or a problem that ``hoop doctor`` found · 2 a mistake in what
was asked · 3 a peer failed or did not answer · 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP. ``hoop run`` ends with the code of
the failed rank. A command whose result is what it prints ends with 1 if that could not be written; all others with the
code of what they did, whether anybody reads their output or not.

Nothing is imported here that takes time: a Ctrl-C during an import outside of ``main`` would end in a traceback.
"""

from __future__ import annotations

import os
import sys

from hoop.errors import HoopError, exit_code
from hoop.standard_streams import guard, lost


def main() -> None:
    """The entry point."""
    # gRPC's own log repeats what a peer sent, escape characters included. Errors come back with the call.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    guard()
    try:
        _run()
    except KeyboardInterrupt:
        sys.exit(130)
    except BaseException as error:
        from hoop.cli.running import signal_behind

        if (received := signal_behind(error)) is None:
            raise
        received.delivered = True
        sys.exit(received.code)


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
    except SystemExit as ending:
        if not ending.code:
            _check_printed()
        raise


def _check_printed() -> None:
    """Exits with status 1 if the command's output is its result, and was lost."""
    from hoop.cli.commands import PRINTING
    from hoop.cli.output import echo

    why = lost(sys.stdout)
    if why is None or not set(sys.argv[1:2]) & set(PRINTING):
        return
    if not isinstance(why, BrokenPipeError):
        echo(f"hoop: standard output: {why.strerror}: what this command prints is not whole", err=True)
    sys.exit(1)
