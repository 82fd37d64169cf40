"""``hvd.elastic``: training that goes on when ranks are lost or join. ``hoop run --min-np N`` starts it.

``run`` decorates the training function, whose first argument is a ``State``. When a rank is lost, the others meet
again, restore the last commit and go on; a rank that waits to join is taken in at the next commit.
"""

from hoop.horovod.elastic.run import run
from hoop.horovod.elastic.sampler import ElasticSampler
from hoop.horovod.elastic.state import ObjectState, State, TorchState
from hoop.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = [
    "ElasticSampler",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TorchState",
    "run",
]
