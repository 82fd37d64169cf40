"""Fault specifications for fault injection: a kind, a rank, a step, and the instruction before which it happens.

    kill@rank=2,step=7,instruction=reduce     SIGKILL the rank's process
    stop@rank=1,step=7,seconds=3              SIGSTOP it for 3 s; without seconds, for ever
    slow@rank=1,step=7,factor=4               from then on the rank computes four times slower
    corrupt@rank=0,step=7                     flip a bit in the rank's next TCP message, after its checksum is computed
    drop@rank=0,step=7                        reset the next TCP connection that the rank sends on, mid-message
    partition@rank=0,step=7                   from then on drop everything that the rank sends over TCP
    disk-full@step=7                          the next file write of the run fails with a full disk

A fault happens once: before the first matching instruction in its step or a later one. ``rank`` is the rank at the
start of the job, even if the device's rank changes later; a device that joins later has no faults. A semicolon
separates several faults. ``check_reachable`` rejects a fault that cannot happen in the job.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hoop.errors import InvalidArgument
from hoop.plan.instructions import InstructionKind
from hoop.plan.plan import Plan

FAULT_FIELDS: Mapping[str, tuple[str, ...]] = {
    "kill": ("rank", "step", "instruction"),
    "stop": ("rank", "step", "instruction", "seconds"),
    "slow": ("rank", "step", "instruction", "factor"),
    "corrupt": ("rank", "step", "instruction"),
    "drop": ("rank", "step", "instruction"),
    "partition": ("rank", "step", "instruction"),
    "disk-full": ("step",),
}
"""Names of the fields that each kind of fault takes."""
LINK_FAULTS = frozenset({"corrupt", "drop", "partition"})
"""Kinds of faults of TCP connections."""
DISK_FULL = "disk-full"
"""The one kind of fault without a rank: it hits the process that writes the run's files."""
_INSTRUCTIONS = {kind.name.lower().replace("_", "-"): kind for kind in InstructionKind}
"""Instruction kinds by their name in a fault specification."""


@dataclass(frozen=True)
class Fault:
    """One fault to inject."""

    kind: str
    rank: int = 0
    step: int = 1
    """Step in which the fault happens, counted from 1."""
    instruction: str = ""
    """Name of the kind of instruction before which it happens: forward, reduce, send-output …; empty: any."""
    seconds: float = 0.0
    factor: float = 4.0

    def __post_init__(self) -> None:
        if self.kind not in FAULT_FIELDS:
            raise InvalidArgument(f"fault: {self.kind!r} is unknown; there are {', '.join(FAULT_FIELDS)}")
        if self.instruction and self.instruction not in _INSTRUCTIONS:
            raise InvalidArgument(
                f"fault {self.kind}: instruction {self.instruction!r} is unknown; there are {', '.join(_INSTRUCTIONS)}"
            )
        finite = math.isfinite(self.seconds) and math.isfinite(self.factor)
        if self.rank < 0 or self.step < 1 or self.seconds < 0 or self.factor < 1 or not finite:
            raise InvalidArgument(f"fault {self}: rank is 0 or more, step and factor 1 or more, seconds not negative")

    def __str__(self) -> str:
        fields = [f"{name}={getattr(self, name):g}" for name in FAULT_FIELDS[self.kind] if name != "instruction"]
        if self.instruction:
            fields.append(f"instruction={self.instruction}")
        return f"{self.kind}@{','.join(fields)}"

    def is_due(self, step: int, kind: InstructionKind) -> bool:
        """Whether the fault happens before an instruction of this kind in this step."""
        return step >= self.step and self.instruction in ("", _name(kind))


def check_reachable(faults: Sequence[Fault], plan: Plan, steps: int, has_tcp_links: bool = True) -> None:
    """Raises if a fault can never happen. The engine calls it before the first step, with the job's first plan.

    steps: total steps of the job.
    has_tcp_links: whether the ranks have TCP connections between them.
    """
    for fault in faults:
        if fault.step > steps:
            remedy = (
                f"name one of 1..{steps}, or train for longer (epochs, max_steps)"
                if steps
                else "train for at least one"
            )
            raise InvalidArgument(f"fault {fault}: step {fault.step} never comes, the job has {steps} steps; {remedy}")
        if fault.kind == DISK_FULL:
            continue
        if fault.rank >= plan.size:
            raise InvalidArgument(
                f"fault {fault}: rank {fault.rank} does not exist, the job begins with ranks 0..{plan.size - 1}, and "
                f"devices that join later have no faults; name one of these, or use {fault.rank + 1} devices"
            )
        if fault.kind in LINK_FAULTS and not has_tcp_links:
            raise InvalidArgument(
                f"fault {fault}: {fault.kind} needs TCP connections, and the devices of this job share memory; use "
                "devices on several hosts, or started with --advertise-data"
            )
        _check_instruction(fault, plan)


def _check_instruction(fault: Fault, plan: Plan) -> None:
    """Raises if the rank never executes the fault's instruction.

    The load balancer moves shards between ranks that hold the same stages. So a rank may execute any instruction that
    one of these ranks has in the first plan.
    """
    own = plan.held_by(fault.rank)
    replicas = [rank for rank in range(plan.size) if rank == fault.rank or (own and plan.held_by(rank) == own)]
    possible = [
        _name(kind) for kind in InstructionKind if kind in {one.kind for rank in replicas for one in plan.ranks[rank]}
    ]
    if not possible:
        raise InvalidArgument(
            f"fault {fault}: rank {fault.rank} is a standby rank without instructions; name another rank"
        )
    if fault.instruction and fault.instruction not in possible:
        wanted = _INSTRUCTIONS[fault.instruction]
        ranks = [str(rank) for rank in range(plan.size) if any(one.kind is wanted for one in plan.ranks[rank])]
        others = f"ranks {', '.join(ranks)} have it" if ranks else "no rank of this strategy has it"
        raise InvalidArgument(
            f"fault {fault}: rank {fault.rank} has no {fault.instruction}; it has {', '.join(possible)}; {others}"
        )


def _name(kind: InstructionKind) -> str:
    return kind.name.lower().replace("_", "-")


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Parses faults separated by semicolons; the inverse of ``str`` for each."""
    return tuple(_parse(one.strip()) for one in text.split(";") if one.strip())


def _parse(text: str) -> Fault:
    kind, _, rest = text.partition("@")
    known = FAULT_FIELDS.get(kind, ())
    values: dict[str, str | int | float] = {}
    for item in rest.split(",") if rest else ():
        name, equals, value = item.partition("=")
        if kind in FAULT_FIELDS and (name not in known or not equals):
            raise InvalidArgument(f"fault: {item!r} in {text!r} is none of {', '.join(known)}, as name=value")
        try:
            number = int if name in ("rank", "step") else float
            values[name] = value if name == "instruction" else number(value)
        except ValueError:
            raise InvalidArgument(f"fault: {name} {value!r} in {text!r} is not a number") from None
    return Fault(kind, **values)  # type: ignore[arg-type]
