"""``hoop.elastic``: keep your own training loop, and get the same weights on any number of devices.

    run = hoop.elastic.Run(model=model, optimizer=optimizer, data=dataset, batch_size=256, shards=8, epochs=10)
    for step in run.steps():                     # healing, joining and leaving happen here
        for batch in step.shards():              # this device's shards of the global batch
            loss = criterion(model(batch[0]), batch[1])
            step.backward(loss, weight=len(batch[1]))
        step.update()                            # ordered sum, optimizer.step(), commit

``python train.py`` trains on one device, ``hoop run -np 4 train.py`` on four; so do torchrun, srun and mpirun.

May import: collectives wire membership client schedulers servers data engine launch runs.
"""

from hoop.elastic.run import Run
from hoop.elastic.step import Step

__all__ = ["Run", "Step"]

PUBLIC = ()
"""Modules that other rooms may import."""
