"""Reads the documentation: the fenced blocks of a page, and the command lines in them and in the examples."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"(?P<indent> *)(?P<fence>`{3,}|~{3,}) *(?P<language>[\w+-]*)")
HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)")
SHELL = {"sh", "bash", "console"}
"""Languages of blocks that hold command lines."""
EXAMPLE_LINE = re.compile(r"\s*#?\s*((?:hoop|python|torchrun) \S.*?)(?:\s{2,}\S.*)?")
"""A command in the docstring or a comment of an example; what it does follows after two spaces."""


@dataclass
class Block:
    """A fenced block, or (language None) one line of prose."""

    line: int
    language: str | None
    lines: list[str]


def blocks(text: str) -> Iterator[Block]:
    """The lines of prose and the fenced blocks of a page, each with the number of its first line."""
    fence, indent, block = "", 0, Block(0, None, [])
    for number, line in enumerate(text.splitlines(), start=1):
        if fence:
            if line.strip().startswith(fence) and not line.strip(f" {fence[0]}"):
                yield block
                fence = ""
            else:
                block.lines.append(line.removeprefix(" " * indent))
        elif opened := FENCE.match(line):
            fence, indent = opened["fence"], len(opened["indent"])
            block = Block(number + 1, opened["language"].lower(), [])
        else:
            yield Block(number, None, [line])
    if fence:
        yield block


def command_lines(block: Block) -> Iterator[tuple[int, str]]:
    """The commands of a block: lines after ``$`` in a console block, every line in a shell block."""
    lines = iter(enumerate(block.lines, start=block.line))
    for number, line in lines:
        typed = line.strip()
        if typed.startswith("$ "):
            typed = typed[2:]
        elif block.language == "console":
            continue
        while typed.endswith("\\"):
            typed = typed[:-1] + next(lines, (0, ""))[1].strip().removeprefix("> ")
        yield number, typed
        if heredoc := HEREDOC.search(typed):
            while next(lines, (0, heredoc[1]))[1].strip() != heredoc[1]:
                pass


def example_block(path: Path) -> Block:
    """The commands that the docstring of an example, or the first comment of a file that is not Python, names."""
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text), clean=False) or ""
    found = [EXAMPLE_LINE.fullmatch(line) for line in text.splitlines()]
    return Block(1, "sh", [match[1] if match else "" for match in found])
