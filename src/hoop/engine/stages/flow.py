"""What flows through a rank's stages: inputs and outputs forward, their gradients backward, from stage to stage."""

from __future__ import annotations

from torch import Tensor

from hoop.engine.feed import Feed
from hoop.engine.messages import Post
from hoop.plan.instructions import Instruction

Key = tuple[int, int]
"""A stage and a micro-batch."""


class Flow:
    """Tensors between stages, here or at another rank; of a micro-batch without samples there are none."""

    def __init__(self, feed: Feed, post: Post) -> None:
        self.feed, self.post = feed, post
        self.deadline = 0.0
        self.inputs: dict[Key, Tensor] = {}
        self.outputs: dict[Key, Tensor] = {}
        self.gradients: dict[Key, Tensor] = {}
        """Of a stage's output."""
        self.returns: dict[Key, Tensor] = {}
        """Of a stage's input."""

    def load(self, instruction: Instruction) -> None:
        if not self.feed.empty(instruction.micro):
            self.inputs[0, instruction.micro] = self.feed.inputs(instruction.micro)

    def input(self, stage: int, micro: int) -> Tensor:
        """What was loaded, received, or left by the stage before."""
        found = self.inputs.pop((stage, micro), None)
        return self.outputs.pop((stage - 1, micro)) if found is None else found

    def gradient(self, stage: int, micro: int) -> Tensor:
        """What the loss gave, was received, or was left by the stage after."""
        found = self.gradients.pop((stage, micro), None)
        return self.returns.pop((stage + 1, micro)) if found is None else found

    def send_output(self, one: Instruction) -> None:
        if not self.feed.empty(one.micro):
            self.post.send(one, self.outputs.pop((one.stage, one.micro)), self.deadline)

    def recv_input(self, one: Instruction) -> None:
        if not self.feed.empty(one.micro):
            self.inputs[one.stage, one.micro] = self.post.expect(one, self.deadline)

    def send_gradient(self, one: Instruction) -> None:
        if not self.feed.empty(one.micro):
            self.post.send(one, self.returns.pop((one.stage, one.micro)), self.deadline)

    def recv_gradient(self, one: Instruction) -> None:
        if not self.feed.empty(one.micro):
            self.gradients[one.stage, one.micro] = self.post.expect(one, self.deadline)
