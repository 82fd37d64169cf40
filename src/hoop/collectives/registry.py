"""The catalog of collectives with their algorithms, and ``Operation``: one call of a collective."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from hoop.collectives import hierarchical, naive, ring, shm_algorithms, tree
from hoop.collectives.compression import compressor
from hoop.collectives.plan import CollectivePlan, Shape
from hoop.collectives.reduction import OPERATIONS
from hoop.errors import InvalidArgument
from hoop.memory.dtypes import DType, dtype

PlanFunction = Callable[[Shape, int], CollectivePlan]
DEFAULT_CHUNK_BYTES = 256 * 1024
MAX_ELEMENTS = 1 << 48
FLOAT32 = dtype("float32")


@dataclass(frozen=True)
class Collective:
    """One collective: its algorithms and the sizes of its operands."""

    algorithms: dict[str, PlanFunction]
    """By messages, over any link; the first is the default."""
    source: Callable[[Shape, int], int]
    """Elements that a rank's source must have, from shape and rank."""
    destination: Callable[[Shape, int], int]
    """Elements that a rank's destination must have, from shape and rank."""
    shared: dict[str, PlanFunction]
    """Between ranks that map each other's memory."""
    reduces: bool = False
    spanning: dict[str, PlanFunction] = field(default_factory=dict)
    """Over several hosts, where ranks of one host map each other's memory."""

    @property
    def all_algorithms(self) -> dict[str, PlanFunction]:
        return {**self.algorithms, **self.shared, **self.spanning}


def _one_block(shape: Shape, rank: int) -> int:
    return shape.count


def _all_blocks(shape: Shape, rank: int) -> int:
    return shape.size * shape.count


def _nothing(shape: Shape, rank: int) -> int:
    return 0


def _at_root(extent: Callable[[Shape, int], int]) -> Callable[[Shape, int], int]:
    return lambda shape, rank: extent(shape, rank) if rank == shape.root else 0


def _at_peer(shape: Shape, rank: int) -> int:
    return shape.count if rank == shape.peer else 0


def _shared(plan: Callable[..., CollectivePlan]) -> dict[str, PlanFunction]:
    """The two algorithms in shared memory: ``direct`` needs a final barrier, since it works in the caller's memory."""
    return {"staged": plan, "direct": functools.partial(plan, final_barrier=True)}


CATALOG: dict[str, Collective] = {
    "all_reduce": Collective(
        {
            "ring": ring.all_reduce,
            "chunked_ring": ring.chunked_all_reduce,
            "naive": naive.all_reduce,
            "tree": tree.all_reduce,
            "halving_doubling": tree.halving_doubling_all_reduce,
        },
        _one_block,
        _one_block,
        {
            "flat": shm_algorithms.flat_all_reduce,
            "staged": shm_algorithms.staged_all_reduce,
            "direct": shm_algorithms.direct_all_reduce,
        },
        reduces=True,
        spanning={"hierarchical": hierarchical.all_reduce, "hierarchical_tree": hierarchical.tree_all_reduce},
    ),
    "broadcast": Collective(
        {"tree": tree.broadcast, "naive": naive.broadcast},
        _at_root(_one_block),
        _one_block,
        _shared(shm_algorithms.broadcast),
        spanning={"hierarchical": hierarchical.broadcast},
    ),
    "reduce": Collective(
        {"tree": tree.reduce, "naive": naive.reduce},
        _one_block,
        _at_root(_one_block),
        _shared(shm_algorithms.reduce),
        reduces=True,
    ),
    "all_gather": Collective({"ring": ring.all_gather}, _one_block, _all_blocks, _shared(shm_algorithms.all_gather)),
    "reduce_scatter": Collective(
        {"ring": ring.reduce_scatter}, _all_blocks, _one_block, _shared(shm_algorithms.reduce_scatter), reduces=True
    ),
    "gather": Collective({"naive": naive.gather}, _one_block, _at_root(_all_blocks), _shared(shm_algorithms.gather)),
    "scatter": Collective({"naive": naive.scatter}, _at_root(_all_blocks), _one_block, _shared(shm_algorithms.scatter)),
    "all_to_all": Collective(
        {"pairwise": naive.all_to_all}, _all_blocks, _all_blocks, _shared(shm_algorithms.all_to_all)
    ),
    "barrier": Collective({"tree": tree.barrier}, _nothing, _nothing, {"staged": shm_algorithms.barrier}),
    "send": Collective({"naive": naive.send}, _at_root(_one_block), _at_peer, {}),
}


@dataclass(frozen=True)
class Operation:
    """One call of a collective, with the arguments that must be equal on all ranks. Checked when it is made."""

    collective: str
    count: int = 0
    dtype: DType = FLOAT32
    op: str = "sum"
    algorithm: str = ""
    """Empty: ``selection.choose_algorithm`` chooses."""
    root: int = 0
    peer: int = 0
    chunk_bytes: int = 0
    compression: str = ""
    """For a lossy all_reduce: ``int8``, ``top_k:0.05``, …; empty: exact."""

    def __post_init__(self) -> None:
        if self.collective not in CATALOG:
            raise InvalidArgument(f"collective: {self.collective!r} is unknown; known: {', '.join(CATALOG)}")
        known = CATALOG[self.collective].all_algorithms
        if self.algorithm and self.algorithm not in known:
            raise InvalidArgument(f"algorithm: {self.collective} has no {self.algorithm!r}; it has {', '.join(known)}")
        if self.op not in OPERATIONS:
            raise InvalidArgument(f"op: {self.op!r} is unknown; known: {', '.join(OPERATIONS)}")
        if not 0 <= self.count <= MAX_ELEMENTS:
            raise InvalidArgument(f"count: {self.count} is not in 0..2^48 elements")
        if self.chunk_bytes and self.chunk_bytes < self.dtype.itemsize:
            raise InvalidArgument(
                f"chunk_bytes: {self.chunk_bytes} holds no {self.dtype.name}; at least {self.dtype.itemsize}"
            )
        if self.compression:
            self._check_compression()

    def _check_compression(self) -> None:
        compressor(self.compression)  # raises if the name is unknown
        if self.collective != "all_reduce" or self.dtype != FLOAT32 or self.op not in ("sum", "avg"):
            raise InvalidArgument(f"compression: only of all_reduce, sum or avg of float32; this is {self}")
        if self.algorithm:
            raise InvalidArgument(
                f"algorithm: {self.algorithm} cannot be forced on a compressed all_reduce, which has its own algorithm"
            )

    def check(self, size: int) -> None:
        """Raises InvalidArgument unless root and peer are ranks of a communicator of ``size``."""
        for name, rank in (("root", self.root), ("peer", self.peer)):
            if not 0 <= rank < size:
                raise InvalidArgument(f"{name}: rank {rank} is not in 0..{size - 1}")

    @property
    def default_algorithm(self) -> str:
        """The requested algorithm, or else the default one, which works over any link."""
        return self.algorithm or next(iter(CATALOG[self.collective].algorithms))

    def shape(self, size: int) -> Shape:
        # A segment is never cut into more than 256 chunks, so that the plan stays small.
        chunk = max((self.chunk_bytes or DEFAULT_CHUNK_BYTES) // self.dtype.itemsize, self.count // size // 256)
        return Shape(size, self.count, self.root, self.peer, chunk)

    def plan(
        self,
        size: int,
        rank: int,
        algorithm: str = "",
        count: int | None = None,
        hosts: tuple[int, ...] = (),
        window: int = 0,
    ) -> CollectivePlan:
        """The plan of one rank.

        ``count``: plan for fewer elements, if a vector is processed piece by piece. ``hosts``: the host of each rank,
        for hierarchical algorithms. ``window``: elements of a window inside a host; 0: the vectors are in shared
        memory.
        """
        shape = self.shape(size)
        if count is not None:
            shape = replace(shape, count=count)
        if hosts:
            shape = replace(shape, hosts=hosts, chunk=window)
        return _plan(self.collective, algorithm or self.default_algorithm, shape, rank)

    def extents(self, size: int, rank: int) -> tuple[int, int]:
        """Elements that the rank's source and destination must have."""
        entry, shape = CATALOG[self.collective], self.shape(size)
        return entry.source(shape, rank), entry.destination(shape, rank)

    def blocks(self, size: int) -> int:
        """The size of the largest source, in blocks of ``count`` elements."""
        return CATALOG[self.collective].source(Shape(size, 1, self.root, self.peer), self.root)

    def __str__(self) -> str:
        """Everything that must be equal on all ranks: operations whose texts differ do not match."""
        what = f" {self.op}" if CATALOG[self.collective].reduces else ""
        where = f" from {self.root}" if self.collective in ("broadcast", "scatter", "send") else ""
        where += f" to {self.root}" if self.collective in ("reduce", "gather") else ""
        where += f" to {self.peer}" if self.collective == "send" else ""
        how = f" by {self.algorithm}" if self.algorithm else ""
        how += f" in chunks of {self.chunk_bytes} bytes" if self.chunk_bytes else ""
        how += f" in {self.compression}" if self.compression else ""
        data = f" of {self.count} {self.dtype.name}" if self.collective != "barrier" else ""
        return f"{self.collective}{what}{data}{where}{how}"

    @property
    def synchronizes(self) -> bool:
        """Whether no rank can finish it before every rank has begun it, whatever the algorithm: each rank's result
        depends on data of every other rank."""
        needs_all = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
        return self.collective == "barrier" or (self.collective in needs_all and self.count > 0)


@functools.lru_cache(maxsize=256)
def _plan(collective: str, algorithm: str, shape: Shape, rank: int) -> CollectivePlan:
    return CATALOG[collective].all_algorithms[algorithm](shape, rank)
