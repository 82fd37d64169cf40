"""Faults that are placed: what goes wrong, at which rank, in which step, before which instruction.

    kill@rank=2,step=7,instruction=reduce     the process is gone (SIGKILL)
    stop@rank=1,step=7,seconds=3              it does nothing for 3 s (SIGSTOP); without seconds, for ever
    slow@rank=1,step=7,factor=4               from there on it computes four times slower
    corrupt@rank=0,step=7                     a bit of what it sends next over TCP is flipped, after the checksum
    drop@rank=0,step=7                        the next TCP connection it sends over is reset in the middle
    partition@rank=0,step=7                   nothing that it sends over TCP arrives any more
    disk-full@step=7                          the next file that is written for the run finds no room

A fault happens once, before the first such instruction of its step or a later one; the rank is the one with which the
job began, whichever it has become. Several are written with a semicolon between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hoop.errors import InvalidArgument
from hoop.plan.instructions import Kind

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
_INSTRUCTIONS = {kind.name.lower().replace("_", "-"): kind for kind in Kind}


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
        if self.rank < 0 or self.step < 1 or self.seconds < 0 or self.factor < 1:
            raise InvalidArgument(
                f"fault {self}: rank is 0 or more, step and factor 1 or more, seconds not negative"
            )

    def __str__(self) -> str:
        said = [f"{name}={getattr(self, name):g}" for name in KINDS[self.kind] if name != "instruction"]
        if self.instruction:
            said.append(f"instruction={self.instruction}")
        return f"{self.kind}@{','.join(said)}"

    def is_due(self, step: int, kind: Kind) -> bool:
        """Whether it happens before an instruction of this kind, in this step."""
        return step >= self.step and self.instruction in ("", kind.name.lower().replace("_", "-"))


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
