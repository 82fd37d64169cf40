"""``train_rank``: the function with which a device server trains its rank of a job.

A device server gets this function when it is made (``cli/device.py``, ``runs/training.py``), so that ``servers`` knows
nothing of the engine. It is called on the training thread of a task (``servers/tasks.py``).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hoop import torch_versions
from hoop.collectives.rank_context import RankContext
from hoop.errors import FailedPrecondition, HoopError, PeerCause, PeerLost
from hoop.job_events import Emit, Loaded, Warned

if TYPE_CHECKING:
    from hoop.engine.settings import Settings

log = logging.getLogger("hoop.engine")
FLUSH_TIMEOUT_S = 5.0
"""Seconds that a device that ends after an error of its GPU waits until its last event has been sent."""
EXIT_CODE = 3


def train_rank(
    context: RankContext,
    settings: str,
    emit: Emit,
    stopping: Callable[[], bool],
    resume: bytes | None,
    jobs: Path | None = None,
) -> None:
    """Trains one rank of a job until the job is done or stopped.

    ``settings``: the job's settings as JSON. ``stopping``: whether a stop was requested. ``resume``: checkpoint to
    resume from. ``jobs``: folder with the code of jobs on this machine. Imports PyTorch at the first call, unless this
    process was forked with it.
    """
    torch_versions.check_version(torch_versions.installed_version())
    # Before PyTorch is imported: each device computes on its own cores, without a thread pool over all of them.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from hoop.engine.job import job_for_a_device
    from hoop.engine.recipes import RECIPES
    from hoop.engine.settings import Settings
    from hoop.engine.stage.accelerator import DEVICE_ERRORS
    from hoop.engine.trainer import Trainer
    from hoop.engine.user_code import attribute_exceptions, is_out_of_memory

    checked = Settings.from_json(settings).check()
    if checked.faults:
        context = _with_faults(context, _fault_hook(checked, context, emit))
    with attribute_exceptions(f"in {checked.job}"):
        job, prefix = job_for_a_device(checked.job, RECIPES, jobs), f"job{context.job_id}."
        trainer = Trainer(context, checked, job, emit, stopping, resume, prefix)
        emit(Loaded())
        try:
            trainer.join() if context.joining else trainer.train()
        except DEVICE_ERRORS as error:
            trainer.forget_gpu_state()
            what = _out_of_gpu_memory(error, checked) if is_out_of_memory(error) else str(error)
            if trainer.ranks > 1:
                _end_process(what, context, emit)
            text = f"device {context.device} ran into: {what}"
            if is_out_of_memory(error):
                raise FailedPrecondition(text) from error
            raise PeerLost(text, cause=PeerCause.DEVICE_LOST) from error  # a new process may go on
        finally:
            trainer.close()


def _out_of_gpu_memory(error: Exception, settings: Settings) -> str:
    """What did not fit on a GPU beside the user's model, and what makes room."""
    fewer = f"fewer shards (--set shards={settings.shards // 2})" if settings.shards > 1 else "a smaller model"
    text = str(error).partition(" If reserved but unallocated")[0].strip()
    return (
        f"{text} The memory of its GPU is full: a device holds the gradients of the shards that it computes in a step "
        f"at once, {settings.shards} times the size of the model if it computes all of them, beside weights, optimizer "
        f"state and activations. Use {fewer}, a smaller --batch-size, --set recompute=true, or more GPUs"
    )


def _end_process(error: str, context: RankContext, emit: Emit) -> NoReturn:
    """Ends this device after an error of its GPU, as if it had been killed: the other devices of the job go on.

    After most of these errors no call of CUDA works any more in this process.
    """
    text = f"device {context.device} ends, because it ran into: {error}"
    emit(Warned(text))
    log.error("%s", text)
    context.wait_delivered(FLUSH_TIMEOUT_S)
    os._exit(EXIT_CODE)


def _fault_hook(settings: Settings, context: RankContext, emit: Emit) -> Callable[[Any], None]:
    """Attaches the faults placed at this rank to an executor. A device that joins a running job has none."""
    from hoop.engine.fault_tolerance.fault_injector import FaultInjector

    faults = [] if context.joining else [one for one in settings.parsed_faults if one.rank == context.rank]
    return FaultInjector(faults, emit, context.wait_delivered).attach


def _with_faults(context: RankContext, hook: Callable[[Any], None]) -> RankContext:
    """The context, and every later context of this rank, with the fault hook."""
    wait, commit = context.wait_reassignment, context.commit_reassignment
    assert wait is not None, "a device assigns ranks"
    assert commit is not None, "a device assigns ranks"

    def wait_reassignment(timeout: float, error: HoopError | None) -> RankContext:
        return _with_faults(wait(timeout, error), hook)

    return replace(
        context,
        inject_faults=hook,
        wait_reassignment=wait_reassignment,
        commit_reassignment=lambda: _with_faults(commit(), hook),
    )
