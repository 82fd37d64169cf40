"""The same training by several libraries: the lines that a user writes.

    python benchmarks/user_code/count.py

Counts lines of code (no blank lines, comments and docstrings) of the programs beside this file, and those that are new
or changed against ``plain.py``, which trains in one process. The others train on two processes and keep checkpoints.
Each is run as it is; the one for Horovod with ``hoop.horovod`` in place of ``horovod.torch``. One that needs a library
that is not installed is counted and not run. What a killed process costs is from each library's documentation.
"""

from __future__ import annotations

import ast
import difflib
import io
import re
import subprocess
import sys
import tempfile
import tokenize
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
RUN = [sys.executable, "-m", "hoop", "run", "-np", "2", "--min-np", "1"]
PROGRAMS = {
    "plain.py": [sys.executable],
    "ddp.py": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"],
    "lightning_ddp.py": [sys.executable],
    "horovod_elastic.py": RUN,
    "hoop_train.py": [sys.executable],
    "hoop_elastic.py": RUN,
}
KEPT = {
    "plain.py": "nothing",
    "ddp.py": "the last epoch; torchrun starts all processes again",
    "lightning_ddp.py": "the last epoch; all processes are started again",
    "horovod_elastic.py": "the last commit; sums depend on the number of processes",
    "hoop_train.py": "every step; the same weights to the bit",
    "hoop_elastic.py": "every step; the same weights to the bit",
}
"""What is kept when a process is killed, by the documentation of each library."""


def code_lines(path: Path) -> list[str]:
    """The lines with code."""
    text = path.read_text()
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    numbers: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            numbers.update(range(token.start[0], token.end[0] + 1))
    first = ast.parse(text).body[0]
    assert first.end_lineno is not None
    numbers -= set(range(first.lineno, first.end_lineno + 1))  # the docstring
    return [line.strip() for number, line in enumerate(text.splitlines(), 1) if number in numbers]


def changed(lines: list[str], base: list[str]) -> int:
    return sum(line.startswith("+ ") for line in difflib.ndiff(base, lines))


def accuracy(name: str) -> str:
    """What the program prints at its end."""
    if name == "lightning_ddp.py" and find_spec("lightning") is None:
        return "not run: no lightning"
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / name
        text = (HERE / name).read_text()
        program.write_text(text.replace("import horovod.torch as hvd", "import hoop.horovod as hvd"))
        done = subprocess.run([*PROGRAMS[name], str(program)], cwd=folder, capture_output=True, text=True, timeout=600)
    found = re.search(r"accuracy ([\d.]+)", done.stdout)
    if done.returncode or found is None:
        raise SystemExit(f"{name} failed:\n{done.stdout}{done.stderr}")
    return found[1]


def main() -> None:
    base = code_lines(HERE / "plain.py")
    print("| program | lines | new or changed | accuracy | kept when a process is killed |")
    print("|---|---|---|---|---|")
    for name in PROGRAMS:
        lines = code_lines(HERE / name)
        print(f"| {name} | {len(lines)} | {changed(lines, base)} | {accuracy(name)} | {KEPT[name]} |", flush=True)


if __name__ == "__main__":
    main()
