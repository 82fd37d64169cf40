"""The result of ``hoop.train``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hoop.texts import counted

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Result:
    """The trained model and the summary of the run; the main values of ``summary`` are attributes too."""

    summary: Mapping[str, Any]
    model: nn.Module
    """Module with the trained weights: the one that was given to ``hoop.train``, if one was."""
    average: Mapping[str, Tensor] = field(default_factory=dict)
    """Averaged weights by name, for ``model.load_state_dict(result.average, strict=False)``; empty without ``ema``."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Further metrics of the last evaluation, which the loss function returned."""
        found: Mapping[str, float] = self.summary.get("metrics", {})
        return found

    @property
    def accuracy(self) -> float | None:
        """Share of correct samples at the last evaluation; None if there was none. See ``split``."""
        found: float | None = self.summary["accuracy"]
        return found

    @property
    def loss(self) -> float | None:
        """Loss at the last evaluation; None if there was none. See ``split``."""
        found: float | None = self.summary["loss"]
        return found

    @property
    def split(self) -> str | None:
        """Data of ``accuracy`` and ``loss``: ``test``, or ``train`` if there is no test data."""
        found: str | None = self.summary["split"]
        return found

    @property
    def steps(self) -> int:
        """Steps in all, including those before a resume."""
        return int(self.summary["steps"])

    @property
    def seconds(self) -> float:
        """Seconds from the first step to the end."""
        return float(self.summary["seconds"])

    @property
    def samples_per_second(self) -> float:
        """Samples a second, of all devices together."""
        return float(self.summary["samples_per_second"])

    @property
    def weights_sha256(self) -> str:
        """sha256 of all weights: equal if and only if every bit is."""
        return str(self.summary["weights_sha256"])

    @property
    def bytes_sent(self) -> int:
        """Bytes sent between devices, over links or through shared memory."""
        return int(self.summary["bytes_sent"])

    @property
    def idle_fraction(self) -> float:
        """Share of the time that devices waited for each other."""
        return float(self.summary["idle_fraction"])

    def __repr__(self) -> str:
        figures = {"loss": self.loss, "accuracy": self.accuracy, **self.metrics}
        on = "training " if self.split == "train" else ""
        measured = ", ".join(f"{on}{name} {value:.4f}" for name, value in figures.items() if value is not None)
        steps = f"{counted(self.steps, 'step')} in {self.seconds:.1f} s"
        return f"<Result: {', '.join(filter(None, [measured, steps]))}, weights {self.weights_sha256[:12]}>"
