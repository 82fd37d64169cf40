"""``InstructionProfiler``: the spans of a step follow each other, whatever is deferred."""

from __future__ import annotations

from hoop.engine.executor import DeferredUpdates
from hoop.engine.profiler import InstructionProfiler, now
from hoop.plan.instructions import Instruction, InstructionKind

UPDATE = Instruction(InstructionKind.UPDATE, 0)


def test_a_deferred_update_is_traced_after_the_commit() -> None:
    profiler = InstructionProfiler(tracing=True)
    updates = DeferredUpdates(profiler)
    updates.enabled = True
    done: list[str] = []
    started = now()
    updates.submit(lambda: done.append("update"), UPDATE)
    profiler.record(UPDATE, started, now())
    began = now()
    assert not done
    profiler.record_other("commit", began)
    updates.apply_all()
    assert done == ["update"]
    profiler.record_overhead()
    assert [name for name, *_ in profiler.spans] == ["between steps", "commit", str(UPDATE), "between steps"]
    ends = [begin + seconds for _, _, begin, seconds in profiler.spans]
    assert all(later[2] >= end - 1e-6 for later, end in zip(profiler.spans[1:], ends, strict=False))
