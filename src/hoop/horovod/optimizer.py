"""``hvd.DistributedOptimizer``: an optimizer whose step uses the gradients of all ranks."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hoop.errors import FailedPrecondition, InvalidArgument
from hoop.horovod.compression import Compression, Compressor
from hoop.horovod.gradient_buckets import GradientBuckets
from hoop.horovod.process_sets import ProcessSet, global_process_set
from hoop.horovod.reductions import Average, Reduction, chosen

_all: weakref.WeakSet[DistributedOptimizerMixin] = weakref.WeakSet()


def reset_optimizers() -> None:
    """Drops reductions that will never finish; called when an elastic run has lost a rank."""
    for one in _all:
        one._begin_step()


class DistributedOptimizerMixin:
    """What ``DistributedOptimizer`` adds to the class of an optimizer."""

    param_groups: list[dict[str, Any]]
    step_of_base: Any

    def _distribute(self, named: Iterable[tuple[str, torch.Tensor]] | None, passes: int, options: Any) -> None:
        self._passes, self._bucket_options = passes, options
        self._hooks: dict[torch.Tensor, Any] = {}
        self._should_synchronize, self._synchronized = True, False
        if named is not None:
            self._check_names(list(named))
        self._register_parameters()
        _all.add(self)

    def _parameters(self) -> list[torch.Tensor]:
        return [one for group in self.param_groups for one in group["params"] if one.requires_grad]

    def _check_names(self, named: list[tuple[str, torch.Tensor]]) -> None:
        if any(not (isinstance(one, tuple) and len(one) == 2) for one in named):
            raise InvalidArgument(
                "named_parameters: not pairs of name and parameter, as model.named_parameters() gives"
            )
        names = [name for name, _ in named]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InvalidArgument(f"named_parameters: {', '.join(twice)} twice")
        given = {id(parameter) for _, parameter in named}
        unnamed = sum(id(one) not in given for group in self.param_groups for one in group["params"])
        if unnamed:
            raise InvalidArgument(f"named_parameters: {unnamed} parameters of the optimizer are not among them")

    def _register_parameters(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        parameters = self._parameters()
        self._buckets = GradientBuckets(parameters, *self._bucket_options)
        # The optimizer must not be kept alive by the parameters.
        this = weakref.ref(self)

        def on_gradient(parameter: torch.Tensor) -> None:
            optimizer = this()
            if optimizer is not None:
                optimizer._take_gradient(parameter)

        self._hooks = {one: one.register_post_accumulate_grad_hook(on_gradient) for one in parameters}
        self._begin_step()

    def _begin_step(self) -> None:
        self._left = dict.fromkeys(self._hooks, self._passes)
        """Number of backward passes that still have to add to each parameter's gradient in this step."""
        self._buckets.reset()

    def _take_gradient(self, parameter: torch.Tensor) -> None:
        if self._left[parameter] <= 0:
            raise FailedPrecondition(
                f"gradients were computed more than backward_passes_per_step ({self._passes}) times before step(); "
                "raise it to accumulate gradients over more batches"
            )
        self._left[parameter] -= 1
        self._synchronized = False
        if not self._left[parameter]:
            self._buckets.on_gradient_ready(parameter)

    # ---- Horovod's methods

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sets how many batches' gradients are added up for a step."""
        self._passes = passes
        self._begin_step()

    def synchronize(self) -> None:
        """Waits until every gradient is that of all ranks, for example to clip them before ``step``."""
        self._buckets.synchronize()
        self._begin_step()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """``step`` inside does not synchronize: after a call of ``synchronize``."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronizes, then makes the step. A closure is synchronized each time the optimizer has called it."""
        base: Any = super()
        if not self._should_synchronize:
            return base.step(closure) if closure is not None else base.step()
        if closure is not None:

            def synchronized_closure() -> Any:
                loss = closure()
                self.synchronize()
                return loss

            return base.step(torch.enable_grad()(synchronized_closure))
        if self._synchronized:
            warnings.warn(
                "optimizer.step() after optimizer.synchronize() reduces the gradients a second time; call it inside "
                "optimizer.skip_synchronize()",
                stacklevel=2,
            )
        self.synchronize()
        self._synchronized = False
        return base.step()

    def zero_grad(self, *arguments: Any, **options: Any) -> None:
        """Refuses while gradients are being reduced."""
        if self._buckets.in_progress:
            raise FailedPrecondition(
                "optimizer.zero_grad() after loss.backward() and before optimizer.step() or synchronize(): gradients "
                "are being reduced; call it after the step"
            )
        base: Any = super()
        base.zero_grad(*arguments, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, on every rank, between two steps."""
        base: Any = super()
        base.add_param_group(param_group)
        self._register_parameters()


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: Reduction = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Sequence[Sequence[torch.Tensor]] | int | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """An optimizer of the same class, with the same parameters and state, whose step uses the gradients of all ranks.

    Gradients are reduced in buckets while backward goes on. ``named_parameters``: only checked.
    ``backward_passes_per_step``: batches whose gradients are added up before they are reduced.
    ``gradient_predivide_factor``: with Average, gradients are divided by it before the sum and the rest after it.
    ``groups``: lists of parameters that are reduced together, or their number; by default buckets of up to 25 MiB.
    ``sparse_as_dense``: sparse gradients are made dense first.
    """
    if backward_passes_per_step < 1:
        raise InvalidArgument(f"backward_passes_per_step: {backward_passes_per_step} is less than 1")
    reduction = chosen(op)
    if gradient_predivide_factor != 1.0 and reduction is not Average:
        raise InvalidArgument(f"gradient_predivide_factor: {gradient_predivide_factor}; only with op=hvd.Average")
    kind = type(optimizer)
    distributed: Any = type(kind.__name__, (DistributedOptimizerMixin, kind), {"__doc__": kind.__doc__})
    made = distributed.__new__(distributed)
    made.__dict__.update(optimizer.__dict__)
    options = (
        groups if groups is not None else (num_groups or None),
        process_set,
        reduction,
        compression,
        gradient_predivide_factor,
        sparse_as_dense,
    )
    made._distribute(named_parameters, backward_passes_per_step, options)
    return made
