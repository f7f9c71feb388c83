"""Callbacks: what happens around the steps of a training. Ours are the entries of CALLBACKS.

A new one is a class in a file of its own and a line in CALLBACKS.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from ...checkpoint.plain import from_json, to_json
from ...core.collectives import gather_json
from ...core.plan import WrapPlan
from ...params.enums import imported
from ...params.phases import next_phase
from ..data.batch import Batch
from ..run.preempt import preemption_requested
from ..run.ranks.hang import Heartbeat
from .handed_plan import RunPlan
from .moving_average import MovingAverage
from .train_state import TrainSetup, TrainState

if TYPE_CHECKING:
    from ..data.loader import Batches
    from ..data.open_sources import Splits
    from ..data.processor import SampleProcessor

CALLBACKS = {
    "garbage collection": "mmfsdp.kit.train.garbage:GarbageCollection",
    "wire bytes": "mmfsdp.kit.train.meters:WireMeter",
    "moving average": "mmfsdp.kit.train.average_weights:training_average",  # before they are evaluated
    "feature cache": "mmfsdp.kit.train.features:training_cache",  # its all-gathers are a step's, its memory is not
    "profile": "mmfsdp.kit.train.profile:training_profile",
    "peak memory": "mmfsdp.kit.train.meters:MemoryMeter",
    "GPU use": "mmfsdp.kit.train.gpu_sampler:training_gpus",
    "utilization": "mmfsdp.kit.train.utilization:training_utilization",
    "held-out loss": "mmfsdp.kit.train.evaluate:training_held_out",
    "learning rates": "mmfsdp.kit.train.step_rows:training_rates",
    "padding": "mmfsdp.kit.train.step_rows:PaddingMeter",
    "scores": "mmfsdp.kit.train.metrics:training_scores",
    "watched pictures": "mmfsdp.kit.train.watched_pictures:training_pictures",
    "early stop": "mmfsdp.kit.train.early_stop:training_early_stop",
    "metrics": "mmfsdp.kit.train.step_rows:MetricsFile",
    "log": "mmfsdp.kit.train.step_rows:StepLog",
    "skipped steps": "mmfsdp.kit.train.step_rows:SkippedSteps",
    "own": "mmfsdp.kit.train.own_callbacks:own_callbacks",  # a row is complete, and written, before a person gets it
    "checkpoints": "mmfsdp.kit.train.checkpoints:Checkpoints",
}
"""Name: import path of what gives the callback of a Training, or None where it is not asked for; called in order."""


class Callback:
    """Is called by a training, on every rank; a method does nothing unless it is overridden.

    Where ranks wait for each other in a method, all of them must call it: it may not depend on the rank.
    """

    rank0_only = False
    """True if only rank 0 calls the callback."""

    def on_train_begin(self) -> None:
        """Begin, before the first step."""

    def around_step(self, step: int, micro_batches: list[Any]) -> AbstractContextManager[None]:
        """Return a context for the step, from its first forward to the optimizer's step.

        Elements of micro_batches may be replaced.
        """
        return nullcontext()

    def after_step(self, step: int) -> dict[str, Any]:
        """Return what to add to the row of the step. On a GPU the step was issued, and need not be done."""
        return {}

    def due(self, step: int) -> bool:
        """Return True if the row of this step must be read immediately, which waits for the GPU."""
        return False

    def on_step_end(self, row: dict[str, Any]) -> None:
        """Take the row of metrics of a step. On a GPU it comes after the next step was issued, unless it was due."""

    def on_evaluate(self, scores: dict[str, float]) -> None:
        """Take what was evaluated on held-out samples."""

    def on_save(self, step: int) -> None:
        """Go on after a checkpoint was written, or with `async_save` was begun."""

    def on_train_end(self, result: dict[str, Any]) -> None:
        """Add to what goes into result.json, after the last step."""

    def state_dict(self) -> Any:
        """Return what a resume needs, for the checkpoint: numbers, texts, lists, dicts, small tensors; None if nothing.

        Each rank keeps its own. On another number of ranks, all get the state of rank 0.
        """
        return None

    def load_state_dict(self, state: Any) -> None:
        """Take a state of the checkpoint that the run resumes from, before `on_train_begin`."""

    def close(self) -> None:
        """Release what is held, also after an error."""


class SentBytes(Protocol):
    """Counts the bytes that this rank sends; see `Collectives` in meters.py."""

    @property
    def wire_bytes(self) -> int:
        """Bytes sent since `reset`."""

    def reset(self) -> None:
        """Forget what was counted."""


@dataclass
class Training:
    """A training: its model, data and place, from which each callback is made."""

    setup: TrainSetup
    state: TrainState
    run_plan: RunPlan
    processor: SampleProcessor
    sources: Mapping[str, Splits]
    loader: Batches
    device: torch.device
    beat: Heartbeat
    features: Callback | None = None
    """The feature cache (features.py), opened before the model was wrapped."""
    preempted: bool = False
    """A rank was asked to stop. All ranks learn it in the same step."""
    average: MovingAverage | None = None
    """The moving average of the weights, with `train.ema`."""
    collectives: SentBytes | None = None
    """Counts what this rank sends; what is sent between two steps is not a step's."""
    stop_asked: str = ""
    """The reason why a callback of this rank ends the run, with its name; the other ranks do not know it yet."""
    stopped: str = ""
    """The reason why the run ends before its last step; empty if it does not. All ranks learn it in the same step."""
    end: int = field(init=False)
    """Steps after which other parameters are frozen (`train.freeze_from`), so that the model is wrapped again; in the
    last phase all steps."""
    profiled: bool = False
    """The next step is recorded by the profiler, so nothing else should run before it."""
    callbacks: Callbacks = field(init=False)

    def __post_init__(self) -> None:
        self.end = next_phase(self.setup.params, self.state.step).end
        self.callbacks = Callbacks({name: imported(path)(self) for name, path in CALLBACKS.items()})
        self.callbacks.load_state_dicts(self.state.of_callbacks)

    @property
    def plan(self) -> WrapPlan:
        """The plan that the model was wrapped by."""
        return self.run_plan.plan

    @property
    def ends(self) -> bool:
        """The last step is done, or the last one of a phase or before a preemption."""
        return self.preempted or self.is_last(self.state.step) or self.state.step == self.end

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the weights that are evaluated: with `train.ema` their average."""
        return self.average.in_model() if self.average is not None else nullcontext()

    def is_last(self, step: int) -> bool:
        """Return True if the training ends with this step, and not only for a preemption."""
        if self.stopped:
            return step == self.state.step
        return step >= self.setup.params.train.steps

    def wants_to_stop(self) -> bool:
        """Return True if this rank votes to stop: a signal or a callback has asked for it."""
        return preemption_requested() or bool(self.stop_asked)

    def count_votes(self) -> None:
        """Learn why ranks have voted to stop. Every rank must call it.

        A callback's wish goes before a preemption: a run that is to end need not be started again.
        """
        reasons = list(filter(None, gather_json(self.stop_asked)))
        if reasons:
            self.stopped = f"stopped by {reasons[0]}"
        else:
            self.preempted = True


class AtEvaluation(Callback):
    """Evaluates every `train.eval_every` steps and after the last one; every rank must.

    Not while steps are profiled, nor when a rank must stop soon. With `train.ema` the average weights are evaluated.
    """

    training: Training

    def due(self, step: int) -> bool:
        """Return True for a step after which is evaluated."""
        every = self.training.setup.params.train.eval_every
        assert every is not None, "no callback of this kind is made without it"
        return self.training.is_last(step) or step % every == 0

    def on_step_end(self, row: dict[str, Any]) -> None:
        """Evaluate, if it is time to."""
        training = self.training
        if self.due(row["step"]) and not training.profiled and not training.preempted:
            with training.evaluated_weights():
                scores = self.evaluate(row)
            if scores:
                training.callbacks.on_evaluate(scores)

    def evaluate(self, row: dict[str, Any]) -> dict[str, float]:
        """Evaluate after the step of this row, and add to the row. Returns the scores, which callbacks are handed.

        Must leave the model in training mode, and the random states as they were.
        """
        raise NotImplementedError


class Callbacks:
    """Calls all callbacks, in their order."""

    def __init__(self, callbacks: Mapping[str, Callback | None]) -> None:
        """callbacks: by name; None for one that is not asked for."""
        rank = dist.get_rank()
        self._named = {name: each for name, each in callbacks.items() if each and not (each.rank0_only and rank)}
        self._all = list(self._named.values())

    @contextmanager
    def around_training(self) -> Iterator[None]:
        """Begin, and close all at the end, in the opposite order."""
        with ExitStack() as stack:
            for callback in self._all:
                stack.callback(callback.close)
                callback.on_train_begin()
            yield

    @contextmanager
    def around_step(self, step: int, micro_batches: list[Batch]) -> Iterator[None]:
        """Enter the contexts of a step."""
        with ExitStack() as stack:
            for callback in self._all:
                stack.enter_context(callback.around_step(step, micro_batches))
            yield

    def after_step(self, step: int) -> dict[str, Any]:
        """Return what all add to the row of a step."""
        figures: dict[str, Any] = {}
        for callback in self._all:
            figures |= callback.after_step(step)
        return figures

    def due(self, step: int) -> bool:
        """Return True if the row of a step must be read immediately."""
        return any(callback.due(step) for callback in self._all)

    def on_step_end(self, row: dict[str, Any]) -> None:
        """Hand over a row of metrics. A callback may add to it for those after it."""
        for callback in self._all:
            callback.on_step_end(row)

    def on_evaluate(self, scores: dict[str, float]) -> None:
        """Hand over what was evaluated."""
        for callback in self._all:
            callback.on_evaluate(scores)

    def on_save(self, step: int) -> None:
        """Say that a checkpoint was written."""
        for callback in self._all:
            callback.on_save(step)

    def on_train_end(self, result: dict[str, Any]) -> None:
        """Let all add to the result."""
        for callback in self._all:
            callback.on_train_end(result)

    def state_dicts(self) -> dict[str, list[Any]]:
        """Return the states for a checkpoint, as JSON: of each callback with one, a list by rank.

        One element stands for equal states of all ranks. Every rank must call it.
        """
        own = {name: callback.state_dict() for name, callback in self._named.items()}
        of_ranks = gather_json({name: to_json(state) for name, state in own.items() if state is not None})
        states: dict[str, list[Any]] = {}
        for name in dict.fromkeys(name for own_states in of_ranks for name in own_states):
            by_rank = [own_states.get(name) for own_states in of_ranks]
            states[name] = by_rank[:1] if all(state == by_rank[0] for state in by_rank) else by_rank
        return states

    def load_state_dicts(self, states: Mapping[str, list[Any]]) -> None:
        """Hand over the states of a checkpoint, as `state_dicts` gave them."""
        for name, by_rank in states.items():
            state = by_rank[dist.get_rank() if len(by_rank) == dist.get_world_size() else 0]
            if name in self._named and state is not None:
                self._named[name].load_state_dict(from_json(state))
