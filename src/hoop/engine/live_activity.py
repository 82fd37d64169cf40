"""One rank's activity for other threads: sums of its profiler, and a trace of a few steps on request.

    watching thread    progress  for a rank that hangs (``servers/hang_watch.py``)
    heartbeat thread   read      copies sums that the profiler keeps anyway: the training thread does nothing for it
    device service     trace     asks for the next steps, and waits
    training thread    begin_step, end_step   one attribute is read while no trace was requested

``Trainer`` makes one and publishes it (``RankContext.publish_activity``).
"""

from __future__ import annotations

import statistics
import threading
from collections import deque
from dataclasses import dataclass, field

from hoop.collectives.rank_context import InstructionSpan, RankActivity, RankProgress, StepTrace
from hoop.engine.executor import PlanExecutor
from hoop.engine.profiler import now
from hoop.errors import FailedPrecondition
from hoop.events import wall_clock
from hoop.plan.instructions import COMMUNICATE, SHARE
from hoop.plan.plan import Plan

MAX_SPANS = 5000
"""Maximum number of spans in a trace; later instructions are left out."""
USUAL_STEPS = 20
"""A rank hangs after this many times its usual step, if that is more than the setting ``hang_s``."""
UNUSUAL = 10
"""First steps, evaluations, checkpoints and the loading of data may take this many times ``hang_s``."""
KEPT_DURATIONS = 32
_EMPTY = RankActivity()
_COMMUNICATION = tuple(category for category, share in SHARE.items() if share == COMMUNICATE)
Span = tuple[str, str, float, float]
"""Name, category, start and duration in seconds of an instruction, as in ``InstructionProfiler.spans``."""


@dataclass
class _TraceRequest:
    """A trace that a client waits for. The training thread fills it."""

    steps: int
    first_step: int = -1
    traced: int = 0
    spans: list[Span] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)


class LiveActivity:
    """What a rank does. One trainer owns it."""

    def __init__(self, hang_s: float) -> None:
        """``hang_s``: seconds without progress after which the rank hangs; 0: never."""
        self._hang_s = hang_s
        self._durations: deque[float] = deque(maxlen=KEPT_DURATIONS)
        """Seconds of the last strides but the first of each generation."""
        self._step_began: float | None = None
        """Time when the stride under way began; None: none is under way."""
        self._first_stride = True
        self._over = False
        self._done = 0
        self._executor: PlanExecutor | None = None
        self._steps = 0
        self._request: _TraceRequest | None = None
        self._first_span: int | None = None
        """Index of the first span to delete after a step that is traced only for a request. None: the spans stay."""
        self._plan: Plan | None = None
        self._work: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        """Shards and stages of this rank in ``_plan``, at the rank ``_rank``."""
        self._rank = -1
        self._asking = threading.Lock()
        self._traces = False
        """True if a client has requested a trace of the step under way."""
        self._began = 0
        """Index of the first span of the step under way."""

    # ---- training thread

    def attach(self, executor: PlanExecutor | None) -> None:
        """The executor that runs the rank's steps from now on; None: the job is over, and its memory is to be freed."""
        self._executor, self._first_span, self._traces = executor, None, False
        self._over = executor is None
        self._step_began, self._first_stride = None, True
        if executor is None:
            self._plan = None

    def begin_step(self, first_steps: bool) -> None:
        """Called before the steps of a stride. ``first_steps``: they are traced for the run's files in any case."""
        executor = self._executor
        assert executor is not None, "attached before the first step"
        spans = executor.profiler.spans
        if self._first_span is not None:  # a failure interrupted the last step
            del spans[self._first_span :]
        self._step_began = now()
        requested = self._request is not None
        executor.profiler.tracing = first_steps or requested
        self._first_span = len(spans) if requested and not first_steps else None
        self._traces, self._began = requested, len(spans)

    def end_step(self, done: int, steps: int) -> None:
        """Called after these steps; ``done``: steps done in the job."""
        self._steps += steps
        if self._step_began is not None and not self._first_stride:
            self._durations.append(now() - self._step_began)
        self._step_began, self._first_stride, self._done = None, False, done
        request, executor = self._request, self._executor
        traced, self._traces = self._traces, False
        if executor is not None and traced:
            self._keep(request, executor.profiler.spans, done, steps)

    def _keep(self, request: _TraceRequest | None, spans: list[Span], done: int, steps: int) -> None:
        """Moves the spans of these steps to the request; None: its client waits no more."""
        found = spans[self._began :]
        if self._first_span is not None:
            del spans[self._first_span :]
            self._first_span = None
        if request is None:
            return
        if request.first_step < 0:
            request.first_step = done - steps
        request.spans += found[: MAX_SPANS - len(request.spans)]
        request.traced += steps
        if request.traced >= request.steps:
            self._request = None
            request.done.set()

    # ---- other threads

    def read(self) -> RankActivity:
        """The newest sums."""
        executor = self._executor
        if executor is None:
            return _EMPTY
        seconds = executor.profiler.category_seconds
        shards, stages = self._work_of(executor)
        return RankActivity(
            steps=self._steps,
            load_s=seconds["load"],
            forward_s=seconds["forward"],
            backward_s=seconds["backward"],
            communicate_s=sum(seconds[category] for category in _COMMUNICATION),
            update_s=seconds["update"],
            idle_s=seconds["wait"],
            bytes_sent=executor.bytes_sent,
            shards=shards,
            stages=stages,
        )

    def progress(self) -> RankProgress | None:
        """What changes as the rank gets on, and how long it may take until it does; None: the job is over."""
        executor = self._executor
        if self._over or not self._hang_s:
            return None
        usual_s = statistics.median(list(self._durations) or [0.0])
        limit_s = max(self._hang_s, USUAL_STEPS * usual_s)
        unusual_s = max(limit_s, UNUSUAL * self._hang_s)
        in_step = self._step_began is not None and not self._first_stride
        profiler = executor.profiler if executor is not None else None
        count = self._steps, *((profiler.instructions, profiler.last_end) if profiler is not None else ())
        return RankProgress(
            count=count,
            step=self._done + 1,
            hang_s=self._hang_s,
            limit_s=limit_s if in_step else unusual_s,
            unusual_limit_s=unusual_s,
            on_gpu=executor is not None and executor.accelerator is not None,
        )

    def trace(self, steps: int, timeout_s: float) -> StepTrace:
        """Records the next ``steps`` steps; FailedPrecondition if another trace is under way or the job is over."""
        executor = self._executor
        if executor is None:
            raise FailedPrecondition("trace: this rank trains no more")
        if not self._asking.acquire(blocking=False):
            raise FailedPrecondition("trace: another trace of this rank is under way; ask again when it has ended")
        try:
            request = _TraceRequest(steps)
            self._request = request
            request.done.wait(timeout_s)
            self._request = None
            offset = wall_clock() - now()
            return StepTrace(
                executor.rank,
                max(0, request.first_step),
                request.traced,
                tuple(
                    InstructionSpan(name, category, start + offset, seconds)
                    for name, category, start, seconds in list(request.spans)
                ),
            )
        finally:
            self._asking.release()

    def _work_of(self, executor: PlanExecutor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shards and stages of this rank; computed once for each plan."""
        plan, rank = executor.plan, executor.rank
        if plan is not self._plan or rank != self._rank:
            if rank >= plan.size:  # between two plans
                return (), ()
            stages = tuple(plan.held_by(rank))
            shards = sorted({micro for stage in stages for micro in plan.computed_by(rank, stage)})
            self._work, self._rank = (tuple(shards), stages), rank
            self._plan = plan
        return self._work
