"""A fingerprint of this process's arithmetic: equal on devices that compute the same bits.

PyTorch chooses kernels by the processor (AVX2, AVX-512, NEON, SVE), and their sums round differently.
"""

from __future__ import annotations

import functools
import hashlib
import math

import torch
from torch.nn import functional

from hoop import environment


def rank_environment() -> dict[str, str]:
    """The versions of this process, its arithmetic, and the type of its processor."""
    arithmetic = probe_arithmetic(torch.get_num_threads())
    return {
        **environment.versions(),
        environment.ARITHMETIC: arithmetic,
        environment.PROCESSOR: environment.processor(),
    }


@functools.lru_cache(maxsize=4)
def probe_arithmetic(threads: int) -> str:
    """16 hex digits of the results of a small training: products, a convolution, exp, sums, updates.

    ``threads``: the current number of threads, on which the order of sums may depend; the key of the cache.
    """
    images, labels = _numbers(4, 3, 16, 16), torch.tensor([0, 1, 2, 3])
    weights = [_numbers(8, 3, 3, 3), _numbers(8), _numbers(33, 8 * 16 * 16) / 8, _numbers(33)]
    digest = hashlib.sha256()
    for weight in weights:
        weight.requires_grad_()
    for _ in range(2):
        with torch.enable_grad():
            hidden = functional.gelu(
                functional.batch_norm(
                    functional.conv2d(images, weights[0], weights[1], padding=1), None, None, training=True
                )
            )
            output = functional.linear(hidden.flatten(1), weights[2], weights[3])
            loss = functional.cross_entropy(output, labels) + output.tanh().exp().mean()
            gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= 0.01 * gradient / (gradient.square().mean().sqrt() + 1e-8)
        digest.update(loss.detach().numpy().tobytes())
    for weight in weights:
        digest.update(weight.detach().numpy().tobytes())
    return digest.hexdigest()[:16]


def _numbers(*shape: int) -> torch.Tensor:
    """Numbers between -0.5 and 0.5 that no random generator and no rounding of this machine has a part in."""
    size = math.prod(shape)
    return ((torch.arange(size, dtype=torch.int64) * 7919 % 1009).to(torch.float32) / 1024 - 0.5).reshape(shape)
