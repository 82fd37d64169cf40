"""The search behind ``hoop train mnist``: optimizers and rates with several seeds each, ranked by lowest accuracy.

    python benchmarks/training/recipe.py                 one process per core
    python benchmarks/training/recipe.py --only "adam 0.003 cosine"

Each run is one plain PyTorch process, so that every core trains a model of its own; Hoop's result differs only by
rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

os.environ["OMP_NUM_THREADS"] = "1"  # before PyTorch is loaded

from race import environment, table

from hoop.engine.optimizer_settings import OptimizerSettings

Trial = tuple[OptimizerSettings, int, int]
"""An optimizer, a batch size and a seed."""


def candidates() -> list[tuple[OptimizerSettings, int]]:
    """Optimizers with their batch sizes."""
    adam = OptimizerSettings("adam", 3e-3, schedule="cosine", warmup=100)
    adamw = replace(adam, name="adamw")
    sgd = OptimizerSettings("sgd", 0.1, momentum=0.9, nesterov=True, schedule="cosine", warmup=100)
    found = [replace(adam, lr=lr) for lr in (1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 7e-3, 1e-2)]
    found += [replace(adam, lr=lr, schedule="constant", warmup=0) for lr in (1e-3, 2e-3)]
    found += [replace(adam, warmup=warmup) for warmup in (0, 300)]
    found += [replace(adam, lr=lr, beta2=0.99) for lr in (3e-3, 5e-3)]
    found += [replace(adam, weight_decay=decay) for decay in (1e-5, 1e-4)]
    found += [replace(adamw, lr=lr, weight_decay=decay) for lr in (2e-3, 3e-3, 5e-3) for decay in (0.01, 0.1, 0.3)]
    found += [replace(sgd, lr=lr, weight_decay=decay) for lr in (0.05, 0.1, 0.2, 0.3) for decay in (0.0, 1e-4, 5e-4)]
    return [(one, 256) for one in found] + [(replace(adam), 128), (replace(adam), 512)]


def describe(one: OptimizerSettings, batch: int) -> str:
    parts = [one.name, f"{one.lr:g}", one.schedule, f"warm-up {one.warmup}"]
    parts += [f"decay {one.weight_decay:g}"] if one.weight_decay else []
    parts += [f"beta2 {one.beta2:g}"] if one.beta2 != OptimizerSettings.beta2 else []
    return ", ".join([*parts, f"batch {batch}"])


def accuracy(trial: Trial) -> float:
    """Test accuracy after 10 epochs."""
    import numpy as np
    import torch
    from contender import accuracy_of, optimizer_for

    from hoop.data.catalog import load
    from hoop.data.sampler import SampleOrder
    from hoop.models.catalog import build

    torch.set_num_threads(1)
    chosen, batch, seed = trial
    data = load("mnist")
    inputs, targets = data.train.batch(np.arange(len(data.train)), epoch=0, seed=0)
    model = build("mlp", seed)
    optimizer, criterion = optimizer_for(model, chosen, fused=True), torch.nn.CrossEntropyLoss()
    order = SampleOrder(seed, len(targets))
    steps = order.steps(batch)
    for step in range(10 * steps):
        rows = torch.from_numpy(order.indices(step // steps, step % steps, batch).copy())
        optimizer.param_groups[0]["lr"] = chosen.rate(step, 10 * steps)
        optimizer.zero_grad(set_to_none=True)
        criterion(model(inputs[rows]), targets[rows]).backward()
        optimizer.step()
    return accuracy_of(model, data.test)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5, help="0 up to this")
    parser.add_argument("--only", default="", help="candidates with all of these words, e.g. 'adam 0.003 cosine'")
    parser.add_argument("--workers", type=int, help="processes [default: a core each]")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of a table")
    options = parser.parse_args()
    words = options.only.split()
    found = [one for one in candidates() if set(words) <= set(describe(*one).replace(",", "").split())]
    trials = [(one, batch, seed) for one, batch in found for seed in range(options.seeds)]
    with ProcessPoolExecutor(options.workers) as pool:
        results = list(pool.map(accuracy, trials))
    by_candidate = [results[index * options.seeds : (index + 1) * options.seeds] for index in range(len(found))]
    ranked = sorted(zip(found, by_candidate, strict=True), key=lambda one: min(one[1]), reverse=True)
    if options.json:
        recipes = [{"recipe": describe(*one), "accuracy": accuracies} for one, accuracies in ranked]
        print(json.dumps({"environment": environment(), "recipes": recipes}))
        return
    rows = [
        [
            describe(*one),
            *(f"{100 * value:.2f}" for value in [*values, min(values), statistics.mean(values)]),
        ]
        for one, values in ranked
    ]
    print(
        table(["recipe", *(f"seed {seed}" for seed in range(options.seeds)), "least", "mean"], rows),
        end="\n\n",
    )
    print(environment())


if __name__ == "__main__":
    main()
