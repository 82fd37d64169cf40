"""Commands, links and Python blocks in the documentation are valid.

Commands in ``sh``, ``bash`` and ``console`` blocks exist with their flags, relative links point to a file and to a
heading in it, ``python`` blocks compile. Each violation names file and line.
``tests/process/test_documented_commands.py`` runs the commands.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import typer
from documents import Block, blocks, command_lines

ROOT = Path(__file__).resolve().parents[2]

LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)[^)]*\)|^ {0,3}\[[^\]]+\]:\s*<?([^\s>]+)")
CONTROL = set("();|&")


def documents(root: Path) -> list[Path]:
    """Every page that is checked; README.md and CONTRIBUTING.md must exist."""
    found = [*root.glob("docs/**/*.md"), *root.glob("benchmarks/**/README.md")]
    return [root / "README.md", root / "CONTRIBUTING.md", *root.glob("SECURITY.md"), *sorted(found)]


def simple_commands(typed: str) -> Iterator[list[str]]:
    """``A=1 hoop x && make y`` as ``[hoop, x]`` and ``[make, y]``."""
    lexer = shlex.shlex(typed, posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    words: list[str] = []
    for token in [*lexer, ";"]:
        if set(token) <= CONTROL:
            if words:
                yield words
            words = []
        elif words or not re.match(r"\w+=", token):
            words.append(token)


def hoop_complaint(words: list[str], command: Any) -> str | None:
    """Why ``hoop …`` is not a valid command, according to click's description of the commands."""
    path, rest = ["hoop"], iter(words[1:])
    for word in rest:
        if word == "--":
            return None
        if word.startswith("-") and word.strip("-"):
            flag, equals, _ = word.partition("=")
            known = {name: option for option in command.params for name in [*option.opts, *option.secondary_opts]}
            flag = flag if flag.startswith("--") or flag in known else flag[:2]
            if flag not in known and flag != "--help":
                return f"'{' '.join(path)}' has no flag {flag}"
            takes_value = flag in known and not known[flag].is_flag and not known[flag].count
            if takes_value and not equals and len(word) == len(flag):
                next(rest, None)
        elif subcommands := getattr(command, "commands", None):
            if word not in subcommands:
                return f"'{' '.join(path)}' has no command {word}; it has {', '.join(sorted(subcommands))}"
            command, path = subcommands[word], [*path, word]
        elif not command.context_settings.get("allow_interspersed_args", True):
            return None  # the rest belongs to a program that the command starts
    return None


def make_complaint(words: list[str], root: Path) -> str | None:
    makefile = root / "Makefile"
    text = makefile.read_text("utf-8") if makefile.is_file() else ""
    targets = set(re.findall(r"^([\w-]+):(?!=)", text, re.MULTILINE))
    wanted = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
    missing = [word for word in wanted if word not in targets]
    return f"the Makefile has no target {', '.join(missing)}" if missing else None


def python_complaint(words: list[str], root: Path) -> str | None:
    match words[1:]:
        case ["-m", module, *_] if module.split(".")[0] == "hoop":
            base = root.joinpath("src", *module.split("."))
            runs = base.with_suffix(".py").is_file() or (base / "__main__.py").is_file()
            return None if runs else f"there is no module {module} to run"
        case [program, *_] if program.endswith(".py") and not (root / program).is_file():
            return f"there is no file {program}"
    return None


def script_complaint(script: str, root: Path) -> str | None:
    runs = (root / script).is_file() and os.access(root / script, os.X_OK)
    return None if runs else f"there is no executable {script}"


def command_complaint(words: list[str], root: Path, hoop: Any) -> str | None:
    name = words[0].removeprefix("./").removeprefix(".venv/bin/")
    if name == "hoop":
        return hoop_complaint(words, hoop)
    if name == "make":
        return make_complaint(words, root)
    if re.fullmatch(r"python(3(\.\d+)?)?", name):
        return python_complaint(words, root)
    return script_complaint(name, root) if name.startswith("scripts/") else None


@functools.cache
def anchors(text: str) -> frozenset[str]:
    """The anchors that GitHub gives the headings of a page with this text."""
    found: Counter[str] = Counter()
    names = set()
    for block in blocks(text):
        if block.language is None and (heading := re.match(r"#+ +(.*)", block.lines[0])):
            title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).strip().lower()
            name = re.sub(r"[^\w\- ]", "", title).replace(" ", "-")
            names.add(f"{name}-{found[name]}" if found[name] else name)
            found[name] += 1
    return frozenset(names)


def link_complaint(target: str, page: Path) -> str | None:
    if re.match(r"[a-z][a-z0-9+.-]*:", target):
        return None
    path, _, anchor = unquote(target).partition("#")
    to = page.parent / path if path else page
    if not to.exists():
        return f"the link {target} leads nowhere"
    if anchor and to.suffix == ".md" and anchor not in anchors(to.read_text("utf-8")):
        return f"the link {target} names no heading"
    return None


def block_complaints(block: Block, page: Path, root: Path, hoop: Any) -> Iterator[tuple[int, str]]:
    """Line and complaint of every violation in the block."""
    if block.language is None:
        prose = re.sub(r"`[^`]*`", "", block.lines[0])
        for target in ("".join(groups) for groups in LINK.findall(prose)):
            if complaint := link_complaint(target, page):
                yield block.line, complaint
    elif block.language in {"sh", "bash", "console"}:
        for line, typed in command_lines(block):
            try:
                commands = list(simple_commands(typed))
            except ValueError as error:
                yield line, f"{typed!r} is not a command line: {error}"
                continue
            for words in commands:
                if complaint := command_complaint(words, root, hoop):
                    yield line, complaint
    elif block.language == "python":
        try:
            compile("\n".join(block.lines), str(page), "exec")
        except SyntaxError as error:
            yield block.line + (error.lineno or 1) - 1, f"python that does not compile: {error.msg}"


def violations(root: Path, hoop: Any) -> list[str]:
    """Every violation in the documentation of this tree."""
    errors = []
    for page in documents(root):
        if not page.is_file():
            errors.append(f"{page}:1: is missing")
            continue
        for block in blocks(page.read_text("utf-8")):
            found = block_complaints(block, page, root, hoop)
            errors.extend(f"{page}:{line}: {complaint}" for line, complaint in found)
    return errors


def test_documentation_is_valid() -> None:
    from hoop.cli.commands import command_line

    errors = violations(ROOT, typer.main.get_command(command_line()))
    assert not errors, "\n" + "\n".join(errors)


def test_walks_name_existing_files_and_count_them() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    walks = page.split("## Four walks")[1].split("\n## ")[0].split("\n**(")[1:]
    assert len(walks) == 4
    for walk in walks:
        title, _, steps = walk.partition("\n")
        files = set(re.findall(r"`([\w/]+\.py)`", steps))
        missing = sorted(name for name in files if not (ROOT / "src" / "hoop" / name).is_file())
        assert not missing, f"({title}: no such files: {missing}"
        assert f" {len(files)} files" in title, f"({title}: the list names {len(files)} files"


@pytest.fixture
def hoop() -> Any:
    """A small command line built like Hoop's."""
    app, devices = typer.Typer(), typer.Typer()

    @app.command()
    def train(name: str, steps: int = typer.Option(1, "--steps", "-n"), quick: bool = False) -> None: ...

    @devices.command("list")
    def list_(json: bool = typer.Option(False, "--json")) -> None: ...

    @app.callback()
    def main(log: str = "info") -> None: ...

    app.add_typer(devices, name="devices")
    return typer.main.get_command(app)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for folder in ("docs/deep", "scripts", "examples", "benchmarks/ring", "src/hoop"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "Makefile").write_text("VENV := .venv\ntest: check ## all\n\tpytest\ncheck:\n\truff\n")
    (tmp_path / "scripts" / "proto").touch(mode=0o755)
    (tmp_path / "scripts" / "notes").touch(mode=0o644)
    (tmp_path / "examples" / "ring.py").touch()
    (tmp_path / "src" / "hoop" / "__main__.py").touch()
    for page in ("README.md", "CONTRIBUTING.md", "docs/deep/page.md", "benchmarks/ring/README.md"):
        (tmp_path / page).write_text("# A page\n")
    return tmp_path


VALID_COMMANDS = """
git clone https://example.org/hoop && cd hoop   # anything else is not ours to check
hoop train mnist --steps 3 --quick --no-quick | tail -1 > out.txt
hoop --log debug train mnist -n3 --steps=-1 \\
  --quick
OMP_NUM_THREADS=1 hoop devices list --json &
hoop --help; hoop devices --help
.venv/bin/hoop train mnist -- --anything
make
make -j2 test check PYTHON=python3.12
python examples/ring.py --fast
python3 -m hoop train
python -m pytest
python - <<'EOF'
hoop nothing
EOF
scripts/proto
./scripts/proto
"""


def test_valid_pages_pass(tree: Path, hoop: Any) -> None:
    links = "[up](../../README.md#a-page) ![it](<page.md>) [web](https://example.org) [here](#a) `[no](no.md)`"
    python = "1. ```python\n   if True:\n       x = 1\n   ```"
    console = "```console\n$ hoop train mnist\nhoop says: done\n```"
    page = tree / "docs" / "deep" / "page.md"
    page.write_text(
        f"# A\n{links}\n[ref]: page.md\n\n{python}\n{console}\n```sh{VALID_COMMANDS}```\n```text\nmake tea\n```\n"
    )
    assert violations(tree, hoop) == []


@pytest.mark.parametrize(
    ("text", "line", "complaint"),
    [
        ("```sh\nhoop fly\n```", 3, "'hoop' has no command fly; it has devices, train"),
        ("```sh\n\nhoop train --steps 3 --slow\n```", 4, "'hoop train' has no flag --slow"),
        ("```sh\nhoop train --steps 3 \\\n  --slow\n```", 3, "'hoop train' has no flag --slow"),
        ("```sh\nhoop devices list -x\n```", 3, "'hoop devices list' has no flag -x"),
        ("```sh\nhoop --steps 3 train\n```", 3, "'hoop' has no flag --steps"),
        ("```bash\ncd x && make tea\n```", 3, "the Makefile has no target tea"),
        ("```console\n$ make tea\n```", 3, "the Makefile has no target tea"),
        ("- x\n  ~~~sh\n  make tea\n  ~~~", 4, "the Makefile has no target tea"),
        ("```sh\npython examples/star.py\n```", 3, "there is no file examples/star.py"),
        ("```sh\npython -m hoop.star\n```", 3, "there is no module hoop.star to run"),
        ("```sh\nscripts/nothing\n```", 3, "there is no executable scripts/nothing"),
        ("```sh\nscripts/notes\n```", 3, "there is no executable scripts/notes"),
        (
            "```sh\nhoop train 'mnist\n```",
            3,
            '"hoop train \'mnist" is not a command line: No closing quotation',
        ),
        ("see [it](docs/no.md)", 2, "the link docs/no.md leads nowhere"),
        ("see [it](#no-page)", 2, "the link #no-page names no heading"),
        ("![it](no.png 'title')", 2, "the link no.png leads nowhere"),
        ("[ref]: no.md", 2, "the link no.md leads nowhere"),
        ("```python\nx = 1\nx = = 1\n```", 4, "python that does not compile: invalid syntax"),
    ],
)
@pytest.mark.parametrize("page", ["README.md", "benchmarks/ring/README.md"])
def test_a_violation_is_reported(tree: Path, hoop: Any, page: str, text: str, line: int, complaint: str) -> None:
    (tree / page).write_text(f"# A page\n{text}\n")
    assert violations(tree, hoop) == [f"{tree / page}:{line}: {complaint}"]


def test_a_missing_page_is_reported(tree: Path, hoop: Any) -> None:
    (tree / "CONTRIBUTING.md").unlink()
    assert violations(tree, hoop) == [f"{tree / 'CONTRIBUTING.md'}:1: is missing"]
