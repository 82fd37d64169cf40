"""What comes of a training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Result:
    """What came of a training: the trained model, and every figure in ``summary``, the main ones as attributes."""

    summary: Mapping[str, Any]
    model: nn.Module
    """With the trained weights; the very module that was given, if one was."""

    @property
    def accuracy(self) -> float | None:
        """The share of samples that are right, at the last evaluation; None before the first. See ``split``."""
        found: float | None = self.summary["accuracy"]
        return found

    @property
    def loss(self) -> float | None:
        """The loss of the samples, at the last evaluation; None before the first. See ``split``."""
        found: float | None = self.summary["loss"]
        return found

    @property
    def split(self) -> str | None:
        """What ``accuracy`` and ``loss`` are of: ``test``, or ``train`` where no test data was given."""
        found: str | None = self.summary["split"]
        return found

    @property
    def steps(self) -> int:
        """Updates since the very beginning, those before a resume included."""
        return int(self.summary["steps"])

    @property
    def seconds(self) -> float:
        """From the first step to the end."""
        return float(self.summary["seconds"])

    @property
    def samples_per_second(self) -> float:
        """Over all devices."""
        return float(self.summary["samples_per_second"])

    @property
    def weights_sha256(self) -> str:
        """One checksum of all weights: equal for equal bits."""
        return str(self.summary["weights_sha256"])

    @property
    def bytes_sent(self) -> int:
        """Between devices, over links or through memory."""
        return int(self.summary["bytes_sent"])

    @property
    def idle_fraction(self) -> float:
        """The share of their time that devices waited for each other."""
        return float(self.summary["idle_fraction"])

    def __repr__(self) -> str:
        training = "training " if self.split == "train" else ""
        accuracy = "" if self.accuracy is None else f"{training}accuracy {self.accuracy:.4f}, "
        return f"<{accuracy}{self.steps} steps in {self.seconds:.1f} s, weights {self.weights_sha256[:12]}>"
