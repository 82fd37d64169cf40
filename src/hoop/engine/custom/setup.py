"""Sets up custom training on one rank: objects, state in the arena, executor and role. Collective."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from hoop.data.dataset import Splits
from hoop.data.structured import structured
from hoop.engine.custom.feed import StructuredFeed
from hoop.engine.custom.loss import CustomLoss
from hoop.engine.custom.objects import (
    TRIED_ELEMENTS,
    JobTrainableState,
    StateTemplate,
    TrainableState,
    keeps_gradients,
    small_twin,
)
from hoop.engine.custom.own_loop import OwnLoopJob
from hoop.engine.custom.state import CustomState
from hoop.engine.executor import CustomParts, PartitionedModel, PlanExecutor, RankRuntime
from hoop.engine.job import Job
from hoop.engine.roles.custom import CustomRole, OwnLoopRole
from hoop.engine.settings import Settings
from hoop.engine.stage.autograd import CPU
from hoop.engine.step_schedule import StepSchedule
from hoop.engine.update_choice import check_can_shard
from hoop.errors import HoopError, InvalidArgument
from hoop.plan.partition import Block
from hoop.plan.plan import Plan
from hoop.strategies.base import Strategy
from hoop.strategies.catalog import parse
from hoop.strategies.data_parallel import DataParallel


def check_strategy(strategy: Strategy) -> None:
    """Raises unless the strategy is data parallel: the others cut the model, or the update, into parts."""
    if not strategy.replicated:
        raise InvalidArgument(
            f"strategy: {strategy.spec} needs a float32 model of one tensor in and out, pairs of tensors as data, and "
            "an optimizer by name; use strategy 'data', which trains every model, batch and optimizer"
        )


def check_parts(job: Job, settings: Settings, model: nn.Module, samples: int) -> None:
    """Raises if a job of custom training cannot be set up: before devices are started, in the user's process."""
    strategy = parse(settings.strategy)
    check_can_shard(DataParallel(sharded=True) if settings.sharded_update == "on" else strategy, custom=True)
    check_strategy(strategy)
    is_small = sum(parameter.numel() for parameter in model.parameters()) <= TRIED_ELEMENTS
    twin = copy.deepcopy(model) if is_small else small_twin(model)
    objects = JobTrainableState(job, settings, twin, StepSchedule(settings, samples).steps_per_epoch)
    try:
        objects.trial_state()
    except HoopError:
        raise
    except Exception:
        if is_small or keeps_gradients(objects.optimizer):
            raise
        # An optimizer of the user's may need the whole parameters: the devices try it on those.


def costs_of(objects: TrainableState, template: StateTemplate) -> Block:
    """The memory of the objects, for the check before the first step. Seconds are not measured."""
    tensors = [one for module in objects.modules for one in [*module.parameters(), *module.buffers()]]
    weights = sum(map(_bytes, tensors)) + sum(map(_bytes, objects.average))
    kept = sum(_bytes(one) for each in template for one in each.values() if isinstance(one, Tensor))
    element = 8 if any(one.dtype == torch.float64 for one in tensors) else 4
    gradients = sum(element * one.numel() for one in tensors)
    return Block("model", 1e-3, weights, kept, 0, 0, gradients, 5e-4)


def _bytes(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // 64) * 64


def prepare_parts(
    runtime: RankRuntime,
    job: Job,
    data: Splits,
    model: nn.Module,
    plan: Plan,
    check_memory: Callable[[list[Block]], object],
) -> tuple[PlanExecutor, CustomRole, list[Block]]:
    """Makes this rank's objects, state, executor and role. ``check_memory`` raises if the state does not fit."""
    loss, settings, accelerator = job.loss, runtime.settings, runtime.accelerator
    assert isinstance(loss, CustomLoss), "with_criterion has found out how the loss is called"
    own_loop = job.objects if isinstance(job, OwnLoopJob) else None
    device = accelerator.device if accelerator is not None and accelerator.cuda else CPU
    if own_loop is not None:
        device = own_loop.device  # the user has put the model there
    elif device != CPU:
        model.to(device)
    schedule = StepSchedule(settings, len(data.train))
    objects: TrainableState = own_loop or JobTrainableState(job, settings, model, schedule.steps_per_epoch)
    template = objects.trial_state()
    costs = [costs_of(objects, template)]
    check_memory(costs)
    train = structured(data.train)
    feed = StructuredFeed(train, settings.seed, settings.timeout_s, settings.job)
    state = CustomState(runtime.vectors, objects, loss, settings, template, device)
    without = replace(runtime, accelerator=None)  # the objects compute on it themselves
    executor = PlanExecutor(
        without, PartitionedModel([model], [0]), plan, data.train, loss, custom=CustomParts(feed, state)
    )
    if isinstance(job, OwnLoopJob) and job.exchange is not None:
        return executor, OwnLoopRole(executor, state, feed, schedule, job.exchange), costs
    return executor, CustomRole(executor, state, feed, schedule), costs
