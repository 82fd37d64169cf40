"""A GAN with hoop.elastic: two models, two optimizers, two losses a shard; points on a circle are learned.

    hoop run -np 2 examples/own_code/gan.py

Both models are updated after each step, with gradients at the weights before it.
"""

from __future__ import annotations

import hashlib

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn

import hoop.elastic

torch.manual_seed(0)
torch.set_num_threads(1)
generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
optimizers = [torch.optim.Adam(one.parameters(), lr=2e-3, betas=(0.5, 0.9)) for one in (generator, discriminator)]
angle = 2 * torch.pi * torch.rand(600)
points = torch.stack([angle.cos(), angle.sin()], dim=1)


def judged(scores: Tensor, real: bool) -> Tensor:
    """The discriminator's loss for scores of real, or of generated, points."""
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(real)))


run = hoop.elastic.Run(
    model={"generator": generator, "discriminator": discriminator},
    optimizer=optimizers,
    data={"points": points},
    batch_size=60,
    shards=4,
    epochs=4,
)
for step in run.steps():
    for batch in step.shards():
        real = batch["points"]
        fake = generator(torch.randn(len(real), 4))  # random numbers are seeded for each shard
        step.backward(judged(discriminator(real), True) + judged(discriminator(fake.detach()), False), len(real))
        discriminator.requires_grad_(False)  # the generator's loss has no gradient for the discriminator
        step.backward(judged(discriminator(fake), True), len(real))
        discriminator.requires_grad_(True)
    step.update()

weights = [one.detach().numpy().tobytes() for model in (generator, discriminator) for one in model.parameters()]
print(f"{step.number + 1} steps, loss {step.loss:.4f}, weights {hashlib.sha256(b''.join(weights)).hexdigest()[:16]}")
