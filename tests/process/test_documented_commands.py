"""Every command line of README.md, CONTRIBUTING.md, SECURITY.md, docs and examples runs as it is written.

The commands of a page are typed in its order, in one folder (``command_session``). A command that would take long gets
options that make it small, and one that cannot run here has a reason: ``TABLE``. All others run unchanged.
Each command that loads PyTorch takes seconds. So README.md, except for commands that repeat what others show, and
SECURITY.md are run by default, and the rest in the slow tests. The pages of benchmarks are measurements on an idle
machine: ``tests/house/test_benchmarks.py`` starts their scripts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from command_session import ROOT, PageSession, page_session
from documents import HEREDOC, SHELL, Block, blocks, command_lines, example_block
from real_etcd import PROGRAM, running_etcd

from hoop.cli.commands import COMMANDS

if TYPE_CHECKING:
    from background import Running

UP = ("--devices", "3", "--memory", "64MiB", "--lab")
SHORT = "--epochs 1 --set max_steps=3"
BY_DEFAULT = ("README.md", "SECURITY.md")
EXAMPLES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").iterdir() if path.is_file())
PAGES = [
    *BY_DEFAULT,
    "CONTRIBUTING.md",
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
    *EXAMPLES,
]
REPRESENTATIVE = ("docs/simulator.md", "hoop calibrate")
"""A command of a page of the slow tests that no other test runs by default."""
RUN_BY_OTHER_TESTS = {
    "bench": "tests/process/test_bench.py",
    "dashboard": "tests/process/test_dashboard.py",
    "demo": "tests/process/test_demo.py",
    "drain": "tests/process/test_drain.py",
    "chaos": "tests/process/test_signals.py",  # until a signal; to its end it takes minutes, in the slow tests
    "doctor": "tests/process/test_networks.py",
    "export": "tests/process/test_train.py",
    "report": "tests/process/test_report.py",
    "run": "tests/process/test_run.py",
}
"""Commands that no page names by default; these tests run them."""
NEEDS_ETCD = re.compile(r"etcd://|:4021,")
"""Commands that use the coordinators on etcd; where it is not installed (``real_etcd``) they are not run."""


class How(Enum):
    RUN = "to its end, which must be with code 0"
    SERVE = "until the page ends; the address it prints is used by the following commands"
    STAND_BY = "until the page ends; it prints no address"
    FOLLOW = "until it has printed a line"
    NOT = "not here"


@dataclass(frozen=True)
class Rule:
    """How commands are run that a pattern matches. The pattern is searched in ``page: command``."""

    pattern: str
    how: How = How.RUN
    add: str = ""
    """Options at the end of the command."""
    why: str = ""
    """Why it is not run, for a reader who wonders."""
    slow: bool = False
    """It is run in the slow tests only."""


TABLE = (
    # Not run here.
    Rule(
        r": make (install|train)\b", How.NOT, why="installs from the network; then it is hoop train mnist --devices 4"
    ),
    Rule(r": make ", How.NOT, why="runs the tests, this one among them"),
    Rule(r": \. \.venv/bin/activate", How.NOT, why="the tests' own environment is active already"),
    Rule(r"--accelerator cuda", How.NOT, why="needs a GPU"),
    Rule(r"gpu-costs\.json", How.NOT, why="needs costs that are measured on a GPU"),
    Rule(r": hoop reproduce all", How.NOT, why="takes an hour; each study is tried by itself"),
    Rule(r": scripts/torch-matrix", How.NOT, why="installs every version of PyTorch from the network"),
    Rule(r": scripts/torch_suite", How.NOT, why="takes many minutes; tests/torch/test_torch_suite.py runs a part"),
    Rule(
        r"torch-backend.md: python block",
        How.NOT,
        why="one line of a program; examples/torch_backend.py is a whole one",
    ),
    Rule(r"from-\S+.md: python block", How.NOT, why="some lines of a program; examples/trainers has whole ones"),
    Rule(r"from-ddp.md: .* train.py", How.NOT, why="the reader's script"),
    Rule(
        r"examples/trainers/(lightning_ddp|hf_\w+).py",
        How.NOT,
        why="needs libraries that are not installed everywhere; tests/torch/test_trainers.py runs it where they are",
    ),
    Rule(r": hoop drain", How.NOT, why="ends a device of the tests' cluster; tests/process/test_drain.py runs it"),
    Rule(r": python lines", How.NOT, why="lines of a program: they use names that the reader's program has"),
    Rule(
        r"torch-backend.md: HOOP_TOKEN_FILE=\S+ torchrun --nnodes 2",
        How.NOT,
        why="the reader's script on two machines; tests/torch/test_torch_groups.py runs torchrun",
    ),
    Rule(r"CONTRIBUTING.md: python block", How.NOT, why="reads the journal of the reader's cluster"),
    Rule(
        r"clusters.md: (JOB=\S+ OUT=\S+ )?(srun|sbatch|mpirun|mpiexec|kubectl|torchrun --nnodes) ",
        How.NOT,
        why="needs that scheduler, or several hosts; tests/process/test_real_schedulers.py starts those that are there",
    ),
    Rule(r": pip install ", How.NOT, why="installs from the network"),
    Rule(
        r"--on ray|: ray job submit|examples/ray/|clusters.md: python block",
        How.NOT,
        why="needs Ray, which is not installed everywhere; tests/process/test_ray.py starts it where it is",
    ),
    Rule(
        r"clusters.md: hoop (coordinator|device|doctor --coordinator) ",
        How.NOT,
        why="the token is in the reader's home folder; SECURITY.md has such servers, test_networks.py the doctor",
    ),
    Rule(r"clusters.md: hoop token", How.NOT, why="writes to the reader's home folder; SECURITY.md has the command"),
    Rule(r": torchrun .* hoop train", add=SHORT),
    # Servers, and commands that never end by themselves.
    Rule(r": hoop coordinator .*etcd:.* --host 10\.0\.0\.2\b", How.STAND_BY),
    Rule(r": hoop up .*--metrics", How.SERVE, "--memory 64MiB --metrics 0"),  # the last one counts: any free ports
    Rule(r"README.md: hoop up\b", How.SERVE, "--memory 64MiB"),
    Rule(r": hoop (up|coordinator)\b", How.SERVE),
    Rule(r": hoop device\b", How.SERVE, "--memory 64MiB"),
    Rule(r": hoop events .*--follow", How.FOLLOW),
    Rule(r": hoop dashboard\b", How.FOLLOW, "--port 0"),
    Rule(r": hoop demo\b", How.NOT, why="opens a browser and takes minutes; tests/process/test_demo.py runs it"),
    # Small where they are long.
    Rule(r": hoop train --list"),
    Rule(r": hoop train .*--coordinator HOST:PORT", add=f"{SHORT} --devices 1", slow=True),
    Rule(r": hoop attach .*HOST:PORT", slow=True),
    Rule(r": hoop train .*--coordinator", add=f"{SHORT} --devices 1"),
    Rule(r": hoop train .*--resume", add="--set max_steps=5"),
    Rule(r": hoop train .*--fault", add="--epochs 1 --set max_steps=10", slow=True),
    Rule(r": hoop train examples/", add=SHORT, slow=True),
    Rule(r"README.md: hoop train ", add=f"{SHORT} --memory 64MiB"),
    Rule(r": hoop train ", add=SHORT),
    Rule(r": hoop chaos .*--runs", add="--runs 1 --devices 2 --steps 40 --faults kill --strategies data", slow=True),
    Rule(r": hoop chaos ", add="--faults 1 --devices 2", slow=True),
    Rule(r": python benchmarks/recovery/overload.py", add="--minutes 0.1 --busy 1 --devices 2"),
    Rule(r": python benchmarks/recovery/replicas.py .*--strategies", add="--turns 1 --steps 40"),
    Rule(r": python benchmarks/recovery/replicas.py", add="--strategies pipeline --turns 1 --steps 40"),
    Rule(r": python benchmarks/recovery/bars.py", add="--turns 1 --only kill"),
    Rule(r": pytest ", add="--collect-only -p no:cacheprovider"),
    Rule(r": python examples/custom_model.py", add="--epochs 1"),
    Rule(r": python examples/lab_training.py", add="--steps 5"),
    Rule(r"examples/torch_backend.py: |: torchrun .* examples/torch_backend.py", add="--steps 5"),
)


@dataclass(frozen=True)
class Typed:
    """A command of a page."""

    page: str
    line: int
    command: str
    """Without the comment at its end. For a block of Python: ``python block``, and ``python lines`` if it imports
    nothing."""
    program: str = ""
    """The lines of a block of Python."""

    @property
    def key(self) -> str:
        return f"{self.page}: {self.command}"

    @property
    def rule(self) -> Rule:
        return next((rule for rule in TABLE if re.search(rule.pattern, self.key)), Rule(""))


def typed(page: str) -> Iterator[list[Typed]]:
    """The commands of a page, block after block."""
    path = ROOT / page
    for block in [example_block(path)] if page in EXAMPLES else blocks(path.read_text("utf-8")):
        if block.language == "python":
            program = "\n".join(block.lines)
            whole = re.search(r"^(import|from) ", program, re.MULTILINE)
            yield [Typed(page, block.line, "python block" if whole else "python lines", program)]
        elif block.language in SHELL:
            yield list(_commands(page, block))


def _commands(page: str, block: Block) -> Iterator[Typed]:
    for line, text in command_lines(block):
        command = re.sub(r"(^|\s)#.*", "", text).strip()
        assert not HEREDOC.search(command), f"{page}:{line}: write a block of Python instead of <<"
        if command:
            yield Typed(page, line, command)


def failures(session: PageSession, page: str, whole: bool, shared: str = "", only: str = "") -> list[str]:
    """Runs the commands of a page; returns every one that failed, with its place and what it printed.

    ``whole``: the slow ones too. ``shared``: the address of a cluster, if the page starts none. ``only``: those that
    begin so.
    """
    found = []
    for block in typed(page):
        with session.shell() as shell:
            for one in block:
                rule = one.rule
                if rule.how is How.NOT or (rule.slow and not whole) or not one.command.startswith(only):
                    continue
                if NEEDS_ETCD.search(one.command) and not session.has_etcd:
                    continue
                command = f"{one.command} {rule.add}".strip()
                if one.program:
                    command = f"python block_{one.line}.py"
                    (session.folder / f"block_{one.line}.py").write_text(session.filled(one.program, shared))
                try:
                    if rule.how in (How.SERVE, How.STAND_BY):
                        session.serve(command, stands_by=rule.how is How.STAND_BY)
                    elif rule.how is How.FOLLOW:
                        session.follow(session.filled(command, shared))
                    else:
                        code, output = shell.run(session.filled(command, shared))
                        assert code == 0, f"exit code {code}: {output}"
                except AssertionError as error:
                    found.append(f"{page}:{one.line}: {command}\n{error}")
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", BY_DEFAULT)
def test_the_usual_commands_of_a_page_run(page: str, tmp_path: Path) -> None:
    with page_session(tmp_path) as session:
        found = failures(session, page, whole=False)
        assert not found, "\n" + "\n".join(found)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", [page for page in PAGES if page != "SECURITY.md" and any(typed(page))])
def test_every_command_of_a_page_runs(page: str, up: Running, tmp_path: Path) -> None:
    with ExitStack() as stack:
        etcd = ""
        if PROGRAM is not None and any(NEEDS_ETCD.search(one.command) for block in typed(page) for one in block):
            etcd = stack.enter_context(running_etcd(tmp_path)).address
        session = stack.enter_context(page_session(tmp_path, etcd, real_start=True))
        found = failures(session, page, whole=True, shared=up.address)
        assert not found, "\n" + "\n".join(found)


def test_a_representative_of_the_other_commands_runs(tmp_path: Path) -> None:
    page, command = REPRESENTATIVE
    with page_session(tmp_path) as session:
        found = failures(session, page, whole=False, only=command)
        assert not found, "\n" + "\n".join(found)


def test_every_command_of_hoop_is_run_by_default() -> None:
    pages = [one for page in BY_DEFAULT for block in typed(page) for one in block]
    usual = [one.command.split() for one in pages if one.rule.how is not How.NOT and not one.rule.slow]
    run = {words[1] for words in usual if words[0] == "hoop"}
    run.add(REPRESENTATIVE[1].split()[1])
    assert run | set(RUN_BY_OTHER_TESTS) == set(COMMANDS)
    for command, test in RUN_BY_OTHER_TESTS.items():
        assert f'"{command}"' in (ROOT / test).read_text(), f"{test} does not run hoop {command}"


def test_every_rule_of_the_table_is_used() -> None:
    used = {one.rule.pattern for page in PAGES for block in typed(page) for one in block}
    unused = [rule.pattern for rule in TABLE if rule.pattern not in used]
    assert not unused, f"no command matches {unused}: remove these rules"


def test_a_command_that_is_not_run_has_a_reason() -> None:
    assert all(bool(rule.why) == (rule.how is How.NOT) for rule in TABLE)


def test_failing_commands_are_reported(tmp_path: Path) -> None:
    """The commands of a block share a shell; one that fails does not keep the next from running."""
    page = tmp_path / "page.md"
    page.write_text(
        "```sh\ncd examples      # here\ntest -f custom_model.py\ncat /dev/zero >/dev/null &\nls nothing\n```\n"
        "```sh\ntest -f custom_model.py\nexit 7\n```\n```python\nimport os\nopen('nothing')\n```\n"
    )
    with page_session(tmp_path) as session:
        found = failures(session, str(page), whole=True)
    assert [one.partition("\n")[0] for one in found] == [
        f"{page}:5: ls nothing",
        f"{page}:8: test -f custom_model.py",
        f"{page}:9: exit 7",
        f"{page}:12: python block_12.py",
    ]
    assert "No such file" in found[0]
    assert "the shell ended" in found[2]
    assert "FileNotFoundError" in found[3]


def test_a_server_that_does_not_start_is_reported(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```sh\nhoop coordinator --port nothing\n```\n")
    with page_session(tmp_path) as session:
        (found,) = failures(session, str(page), whole=True)
    assert found.startswith(f"{page}:2: hoop coordinator --port nothing\nit ended: ")
