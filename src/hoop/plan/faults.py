"""Faults that are placed: what goes wrong, at which rank, in which step, before which instruction.

    kill@rank=2,step=7,instruction=reduce     the process is gone (SIGKILL)
    stop@rank=1,step=7,seconds=3              it does nothing for 3 s (SIGSTOP); without seconds, for ever
    slow@rank=1,step=7,factor=4               from there on it computes four times slower
    corrupt@rank=0,step=7                     a bit of what it sends next over TCP is flipped, after the checksum
    drop@rank=0,step=7                        the next TCP connection it sends over is reset in the middle
    partition@rank=0,step=7                   nothing that it sends over TCP arrives any more
    disk-full@step=7                          the next file that is written for the run finds no room

A fault happens once, before the first such instruction of its step or a later one; the rank is the one with which the
job began, whichever it has become. A device that joins later has no faults. Several are written with a semicolon
between. ``check_reachable`` refuses a fault that cannot happen in the job that begins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hoop.errors import InvalidArgument
from hoop.plan.instructions import InstructionKind
from hoop.plan.plan import Plan

KINDS: Mapping[str, tuple[str, ...]] = {
    "kill": ("rank", "step", "instruction"),
    "stop": ("rank", "step", "instruction", "seconds"),
    "slow": ("rank", "step", "instruction", "factor"),
    "corrupt": ("rank", "step", "instruction"),
    "drop": ("rank", "step", "instruction"),
    "partition": ("rank", "step", "instruction"),
    "disk-full": ("step",),
}
"""What can go wrong, and what is said of it."""
OF_LINKS = frozenset({"corrupt", "drop", "partition"})
"""Faults of TCP connections."""
OF_FILES = "disk-full"
"""The fault of the process that writes the run's files, which no rank does."""
_INSTRUCTIONS = {kind.name.lower().replace("_", "-"): kind for kind in InstructionKind}
"""Each kind of instruction, as it is written in a fault."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    kind: str
    rank: int = 0
    step: int = 1
    """Counted from 1."""
    instruction: str = ""
    """A kind of instruction by its name: forward, reduce, send-output …; empty: any."""
    seconds: float = 0.0
    factor: float = 4.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidArgument(f"fault: {self.kind!r} is unknown; there are {', '.join(KINDS)}")
        if self.instruction and self.instruction not in _INSTRUCTIONS:
            raise InvalidArgument(
                f"fault {self.kind}: instruction {self.instruction!r} is unknown; there are {', '.join(_INSTRUCTIONS)}"
            )
        finite = math.isfinite(self.seconds) and math.isfinite(self.factor)
        if self.rank < 0 or self.step < 1 or self.seconds < 0 or self.factor < 1 or not finite:
            raise InvalidArgument(
                f"fault {self}: rank is 0 or more, step and factor 1 or more, seconds not negative"
            )

    def __str__(self) -> str:
        said = [f"{name}={getattr(self, name):g}" for name in KINDS[self.kind] if name != "instruction"]
        if self.instruction:
            said.append(f"instruction={self.instruction}")
        return f"{self.kind}@{','.join(said)}"

    def is_due(self, step: int, kind: InstructionKind) -> bool:
        """Whether it happens before an instruction of this kind, in this step."""
        return step >= self.step and self.instruction in ("", _name(kind))


def check_reachable(faults: Sequence[Fault], plan: Plan, steps: int, linked: bool = True) -> None:
    """Raises if one of them can never happen: called before the first step, with the plan that the job begins with.

    ``steps``: how many the job has in all. ``linked``: whether ranks have TCP connections between them.
    """
    for fault in faults:
        if fault.step > steps:
            remedy = (
                f"name one of 1..{steps}, or train for longer (epochs, max_steps)"
                if steps
                else "train for some"
            )
            raise InvalidArgument(
                f"fault {fault}: step {fault.step} never comes, the job has {steps} steps; {remedy}"
            )
        if fault.kind == OF_FILES:
            continue
        if fault.rank >= plan.size:
            raise InvalidArgument(
                f"fault {fault}: rank {fault.rank} is not there, the job begins with ranks 0..{plan.size - 1}, and no "
                f"fault is placed at a device that joins later; name one of these, or use {fault.rank + 1} devices"
            )
        if fault.kind in OF_LINKS and not linked:
            raise InvalidArgument(
                f"fault {fault}: {fault.kind} needs TCP connections, and the devices of this job share memory; use "
                "devices on several hosts, or started with --advertise-data"
            )
        _check_instruction(fault, plan)


def _check_instruction(fault: Fault, plan: Plan) -> None:
    """Of ranks that hold the same stages each may get the others' shards, when those are moved to faster devices."""
    own = plan.held_by(fault.rank)
    alike = [rank for rank in range(plan.size) if rank == fault.rank or (own and plan.held_by(rank) == own)]
    there = [
        _name(kind)
        for kind in InstructionKind
        if kind in {one.kind for rank in alike for one in plan.ranks[rank]}
    ]
    if not there:
        raise InvalidArgument(
            f"fault {fault}: rank {fault.rank} does nothing in this job, it stands by; name another rank"
        )
    if fault.instruction and fault.instruction not in there:
        wanted = _INSTRUCTIONS[fault.instruction]
        ranks = [
            str(rank) for rank in range(plan.size) if any(one.kind is wanted for one in plan.ranks[rank])
        ]
        others = f"ranks {', '.join(ranks)} have it" if ranks else "no rank of this strategy has it"
        raise InvalidArgument(
            f"fault {fault}: rank {fault.rank} has no {fault.instruction}; it has {', '.join(there)}; {others}"
        )


def _name(kind: InstructionKind) -> str:
    return kind.name.lower().replace("_", "-")


def parse_faults(text: str) -> tuple[Fault, ...]:
    """The inverse of ``str``, for several."""
    return tuple(_parse(one.strip()) for one in text.split(";") if one.strip())


def _parse(text: str) -> Fault:
    kind, _, rest = text.partition("@")
    known = KINDS.get(kind, ())
    said: dict[str, str | int | float] = {}
    for item in rest.split(",") if rest else ():
        name, equals, value = item.partition("=")
        if kind in KINDS and (name not in known or not equals):
            raise InvalidArgument(f"fault: {item!r} in {text!r} is none of {', '.join(known)}, as name=value")
        try:
            whole = int if name in ("rank", "step") else float
            said[name] = value if name == "instruction" else whole(value)
        except ValueError:
            raise InvalidArgument(f"fault: {name} {value!r} in {text!r} is not a number") from None
    return Fault(kind, **said)  # type: ignore[arg-type]
