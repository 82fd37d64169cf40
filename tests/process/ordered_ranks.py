"""A rank of ``hoop run`` that does what the test orders, over a socket of the test's.

``ordered_ranks.py SOCKET rendezvous|torch``. Its first line says which process it is and where it listens. Each line
that it reads is an order: ``good`` makes what a good process makes of the ports, and answers with a line; ``end``.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import IO, Any

ANSWER_S = 600.0
GROUP_S = 120.0


def meet() -> tuple[dict[str, Any], Callable[[], object]]:
    """A rank of ``hoop run --min-np``: it joins a round for each good order."""
    from hoop.launch.rendezvous_client import RendezvousClient
    from hoop.launch.rendezvous_server import ADDRESS_VARIABLE

    client = RendezvousClient(os.environ, ANSWER_S)
    return {"address": os.environ[ADDRESS_VARIABLE]}, lambda: client.next_round(True).size


def communicate() -> tuple[dict[str, Any], Callable[[], object]]:
    """A rank of ``torch.distributed``: it makes a group, a sum and a message for each good order."""
    import torch
    import torch.distributed as dist

    from hoop.torch_backend import rendezvous

    dist.init_process_group("hoop", timeout=timedelta(seconds=GROUP_S))
    rank, size = dist.get_rank(), dist.get_world_size()

    def sum_in_a_new_group() -> list[float]:
        group: Any = dist.new_group(list(range(size)))
        total, received = torch.full((1000,), float(rank + 1)), torch.zeros(1)
        dist.all_reduce(total, group=group)
        sent = dist.isend(total[:1], (rank + 1) % size, group=group)
        dist.recv(received, (rank - 1) % size, group=group)
        assert sent is not None
        sent.wait()
        dist.destroy_process_group(group)
        return [float(total.min()), float(total.max()), received.item()]

    sum_in_a_new_group()
    listeners = {uri.partition(":")[0]: str(transport.address) for (uri, _), (transport, _) in rendezvous._open.items()}
    return {"listeners": listeners}, sum_in_a_new_group


def serve(orders: IO[str], name: str) -> None:
    described, good = {"rendezvous": meet, "torch": communicate}[name]()
    slot = int(os.environ["LOCAL_RANK"])
    print(json.dumps({"slot": slot, "pid": os.getpid(), **described}), file=orders, flush=True)
    for line in orders:
        if line.strip() == "end":
            break
        print(json.dumps(good()), file=orders, flush=True)


def main() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(sys.argv[1])
        with sock.makefile("rw") as orders:
            serve(orders, sys.argv[2])


if __name__ == "__main__":
    main()
