"""Scenarios: one training each, disturbed by one fault. Strategy, fault, moment and victims are drawn from a seed.

    hoop chaos --runs 100 --seed 7     seeds 7, 8, 9 …: a scenario each

The same seed, with the list of faults and strategies cut down to the ones that it drew, draws the same moment and
victims: a single scenario can be repeated.
"""

from __future__ import annotations

import random
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from hoop.errors import InvalidArgument
from hoop.strategies.catalog import parse

SHARDS = 4
"""Number of shards in a batch of the scenarios' job."""

STRATEGIES = (
    "data",
    "pipeline:1f1b",
    "pipeline:gpipe",
    "pipeline:interleaved",
    "pipeline:zero-bubble",
    "hybrid:replicas=2",
    "ring",
    "ps:bsp",
)
"""The synchronous strategies: their weights do not depend on faults."""


@dataclass(frozen=True)
class FaultKind:
    """A kind of fault: what it does, and what it needs."""

    text: str
    network: bool = False
    """True if every process has a network namespace of its own, which needs root, ip and nft."""
    disk: str = ""
    """Which files are on a small disk, which needs root: ``out`` or ``arenas``; empty: none."""
    arenas: bool | None = None
    """Whether devices have arena files; None: drawn."""


FAULTS = {
    "kill": FaultKind("SIGKILL of a device, which is started again"),
    "stop": FaultKind("SIGSTOP of a device until it is declared dead, then SIGCONT"),
    "slow": FaultKind("a device runs a third of the time, for 2 s"),
    "join": FaultKind("one more device joins"),
    "leave": FaultKind("a device is asked to leave (SIGTERM)"),
    "coordinator": FaultKind("SIGKILL of the coordinator, which is started again on its journal"),
    "kill-two": FaultKind("SIGKILL of two devices at once, which are started again"),
    "kill-all": FaultKind("SIGKILL of all devices, which are started again"),
    "stop-all": FaultKind("SIGSTOP of all devices for 2 to 5 s"),
    "coordinator-and-device": FaultKind("SIGKILL of the coordinator and a device at once; both are started again"),
    "first-second": FaultKind("SIGKILL of a device or the coordinator within a second after the job was accepted"),
    "last-step": FaultKind("SIGKILL of a device in the last step, or when the last step has been reported"),
    "checkpoint": FaultKind("SIGKILL of a device when a snapshot is taken, or of the client while it writes one"),
    "arena-deleted": FaultKind(
        "an arena file is deleted; then its device, or all, are killed and restarted", arenas=True
    ),
    "disk-full": FaultKind("the disk of the run folder is full, for some epochs or to the end", disk="out"),
    "arena-disk-full": FaultKind(
        "the disk of the arenas is full; a device is restarted there, or a new one started", disk="arenas", arenas=True
    ),
    "packet-loss": FaultKind("20 % of the packets of a device, or of all hosts, are lost for some steps", network=True),
    "cut-link": FaultKind(
        "packets between two devices (both ways or one way), or of one device, are dropped: for 5 s, or for good",
        network=True,
    ),
    "cut-coordinator": FaultKind("all packets of the coordinator are dropped for 1 to 6 s", network=True),
    "many-jobs": FaultKind("30 jobs one after the other on one cluster; memory and descriptors are measured"),
}
FIRST_STEP = 2
LAST_STEPS = 10
"""Number of last steps for which no fault whose moment is a step is planned; ``last-step`` is."""


@dataclass(frozen=True)
class Scenario:
    """One disturbed training. The four fractions in [0, 1) are drawn; each fault says what it uses them for."""

    seed: int
    strategy: str
    fault: str
    devices: int
    steps: int
    moment: float
    victim: float
    variant: float
    arena_draw: float

    @property
    def kind(self) -> FaultKind:
        return FAULTS[self.fault]

    @property
    def arenas(self) -> bool:
        """Whether devices have arena files, and are restarted on them."""
        return self.arena_draw < 0.5 if self.kind.arenas is None else self.kind.arenas

    @property
    def step(self) -> int:
        """The step after which the fault is injected."""
        return FIRST_STEP + int(self.moment * max(1, self.steps - FIRST_STEP - LAST_STEPS))

    @property
    def victims(self) -> tuple[int, int]:
        """Two different devices, by number from 1: the victim, and a second one where the fault needs it."""
        first = int(self.victim * self.devices)
        second = (first + 1 + int(self.victim * self.devices % 1 * (self.devices - 1))) % self.devices
        return first + 1, second + 1

    @property
    def may_lose_state(self) -> bool:
        """Whether the fault may destroy every copy of a part of the state (docs/fault-model.md).

        The job then ends with code 3, and is resumed from a checkpoint.
        """
        if self.fault == "kill-two":
            return not self.arenas and not parse(self.strategy).replicated
        if self.fault == "kill-all":  # a data parallel state is torn if the kill comes within an update
            return not self.arenas or parse(self.strategy).replicated
        # Replicas are in memory: if all are killed, the part whose arena is deleted is nowhere.
        return self.fault == "arena-deleted" and self.variant >= 0.5

    def command(self) -> str:
        """The command that repeats it."""
        options = ["--runs", "1", "--seed", str(self.seed), "--faults", self.fault, "--strategies", self.strategy]
        return shlex.join(["hoop", "chaos", *options, "--devices", str(self.devices), "--steps", str(self.steps)])


def draw_scenario(
    seed: int, devices: int, steps: int, faults: Sequence[str] = (), strategies: Sequence[str] = ()
) -> Scenario:
    """The scenario of this seed; empty lists mean all. A strategy that needs it gets a device more.

    Of n faults, each is drawn once by n seeds in a row from a multiple of n on, in random order.
    """
    draw = random.Random(seed)
    fractions = [draw.random() for _ in range(5)]
    names = list(faults or FAULTS)
    random.Random(seed // len(names)).shuffle(names)
    chosen = strategies or STRATEGIES
    strategy, fault = chosen[int(fractions[0] * len(chosen))], names[seed % len(names)]
    return Scenario(seed, strategy, fault, fitting_devices(strategy, devices), steps, *fractions[1:])


def fitting_devices(strategy: str, devices: int) -> int:
    """The number of devices, or one more where the strategy cannot divide them: a hybrid of 2 replicas on 3."""
    try:
        parse(strategy).plan(devices, SHARDS)
    except InvalidArgument:
        return devices + 1
    return devices


def check_names(faults: Sequence[str], strategies: Sequence[str]) -> None:
    """Raises InvalidArgument for a fault that does not exist, and for a strategy whose weights depend on timing."""
    if unknown := sorted(set(faults) - set(FAULTS)):
        raise InvalidArgument(f"--faults: {', '.join(unknown)}: unknown; there are {', '.join(FAULTS)}")
    for name in strategies:
        if not parse(name).synchronous:
            raise InvalidArgument(
                f"--strategies: {name}: its weights depend on timing, so there is nothing to compare them with; name "
                f"synchronous ones, such as {', '.join(STRATEGIES)}"
            )
