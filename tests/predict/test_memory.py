"""The memory events of a micro-step, and the peak that follows from them."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from mmfsdp.core.fake_tensors import fake_mode, fake_model, fake_tensor
from mmfsdp.core.plan import WrapPlan
from mmfsdp.params import FSDPParams, ParamError, TrainParams
from mmfsdp.planning import make_plan
from mmfsdp.predict import memory_events
from mmfsdp.predict.memory import memory_at_rest, step_walk
from mmfsdp.predict.memory_events import record_memory
from tests.bench.peaks import Case
from tests.tiny import tiny_batch, tiny_flamingo

WIDTH = 64


def layers(*trainable: bool) -> nn.Sequential:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)) for _ in trainable))
    for layer, trains in zip(model, trainable, strict=True):
        layer.requires_grad_(trains)
    return model


def planned(model: nn.Module, **fields) -> WrapPlan:
    """Each layer is a unit."""
    fsdp = FSDPParams(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=WIDTH, **fields)
    return make_plan(model, fsdp, world_size=2, example={"input": torch.ones(8, WIDTH)})


def test_a_fake_model_has_shapes_and_no_storage():
    model, mode = tiny_flamingo(), fake_mode()
    fake = fake_model(model, mode, {"perceiver.latents": torch.bfloat16})
    for name, p in fake.named_parameters():
        original = model.get_parameter(name)
        assert isinstance(p, nn.Parameter) and p.shape == original.shape and p.requires_grad == original.requires_grad
        assert p.dtype == (torch.bfloat16 if name == "perceiver.latents" else original.dtype)
    assert fake_tensor(torch.ones(2, device="meta"), mode).device.type == "cpu"
    assert {id(p) for p in model.parameters()}.isdisjoint(id(p) for p in fake.parameters())


def test_events_of_a_micro_step():
    model = layers(False, True, False, True)
    example = {"input": torch.ones(8, WIDTH)}
    plan = planned(model)
    events = [(event.event, plan.units[event.unit].name) for event in plan.memory_events]
    forward = [name for kind, name in events if kind == "pre_forward"]
    backward = [name for kind, name in events if kind == "post_backward"]
    assert forward == ["(root)", "0.0", "1.0", "2.0", "3.0"]
    assert backward[:2] == ["3.0", "2.0"] and {*backward} == {*forward}
    gradients = [event.grads for event in plan.memory_events if event.event == "post_backward"]
    assert gradients[:2] == [4 * WIDTH**2, 0], "those of 3.0 are freed when it is reduced; 2.0 is frozen"
    first, *others = [record_memory(model, plan, example) for _ in range(3)]
    assert others == [first, first], "a storage may have another's address"
    recording = record_memory(tiny_flamingo(), make_plan(tiny_flamingo(), world_size=2), tiny_batch().inputs())
    assert not recording.unused


def test_the_peak_of_a_step():
    model, train = layers(False, True, True), TrainParams()
    fsdp = FSDPParams(sharding_strategy="SHARD_GRAD_OP", frozen_policy="REPLICATE")
    bare = make_plan(model, fsdp, world_size=2)
    peaks = []
    for batch in (8, 512):
        plan = make_plan(model, fsdp, world_size=2, example={"input": torch.ones(batch, WIDTH)})
        peaks.append(step_walk(plan, train).peak)
    small, large = peaks
    assert small.parameters == large.parameters == memory_at_rest(bare).parameters
    assert large.activations - small.activations > 3 * 4 * (512 - 8) * WIDTH
    assert large.bytes > small.bytes and large.when.split(" of ")[0] in ("forward", "backward")
    again = step_walk(plan, TrainParams(accumulation=2)).peak
    assert again.bytes >= large.bytes, "whole gradients wait for the last micro-step"


# Of two layers whose weights take W bytes each, on two ranks: shards 1 W, AdamW's moments 2 W, and what else is held at
# the peak, in W. Activations take less than W / 2.
PEAKS = {
    # FSDP2 in the backward of the first layer: gathered, and still in the output of its all-gather (1 + 1); the input
    # of the last layer's reduction (1), and the result (1 / 2).
    ("FSDP2", None, 1, "cuda"): 1 + 1 + 1 + 0.5,
    # The second micro-step, in the backward of the last layer: gathered (1), the other's all-gather (1), whole
    # gradients of the first micro-step (2), and the new one of this layer (1).
    ("FSDP2", None, 2, "cuda"): 1 + 1 + 2 + 1,
    # Computed in bf16: half of what is gathered, and of the new gradient. FSDP2 keeps fp32 for the reduction.
    ("FSDP2", "bf16", 2, "cuda"): 0.5 + 0.5 + 2 + 0.5,
    # gloo copies the input of a reduction: two inputs (2), the result (1 / 2), and the first layer's all-gather (1).
    ("FSDP2", None, 1, "cpu"): 2 + 0.5 + 1,
    # FSDP1 gathers in place, in the backward of the last layer: both layers (2), its gradient, and the flat copy (2).
    ("FSDP1", None, 1, "cuda"): 2 + 2,
    # In the second micro-step those of the first are held, too, of both layers (2).
    ("FSDP1", None, 2, "cuda"): 2 + 2 + 2,
    # FSDP1 keeps bf16, and casts the sum for the reduction: the first layer, gathered (1 / 2) and its kept gradient
    # (1 / 2); of the last layer the new gradient, the kept one (1 / 2 + 1 / 2), their cast (1) and the result (1 / 2).
    ("FSDP1", "bf16", 2, "cuda"): 0.5 + 0.5 + 0.5 + 0.5 + 1 + 0.5,
}


@pytest.mark.parametrize("backend, precision, micro_steps, device", PEAKS)
def test_the_peak_of_two_layers_by_hand(backend, precision, micro_steps, device):
    plan = planned(layers(True, True), backend=backend, mixed_precision=precision)
    peak = step_walk(plan, TrainParams(accumulation=micro_steps, device=device)).peak
    without_activations = 3 + PEAKS[backend, precision, micro_steps, device]
    assert 0 < peak.bytes / (4 * WIDTH**2) - without_activations < 0.5


@pytest.mark.parametrize("backend", ["FSDP1", "FSDP2"])
def test_fsdp1_frees_a_frozen_layer_after_the_layer_before_it_is_gathered(backend):
    """By hooks on its inputs, which run after those of the outputs that these are."""
    plan = planned(layers(True, False, True), backend=backend)
    events = [(event.event, plan.units[event.unit].name) for event in plan.memory_events]
    freed, gathered = events.index(("post_backward", "1.0")), events.index(("pre_backward", "0.0"))
    assert (freed > gathered) == (backend == "FSDP1")


@pytest.mark.parametrize("backend", ["FSDP1", "FSDP2"])
def test_at_events_of_replicated_layers_nothing_is_gathered_and_the_peak_is_as_without_them(backend):
    plan = planned(layers(True, False, True), backend=backend, frozen_policy="REPLICATE")
    events, most, most_without_gradients = [], 0, 0
    for event in plan.memory_events:
        most = max(most, event.peak)
        most_without_gradients = max(most_without_gradients, event.peak_without_grads)
        if plan.units[event.unit].sharded:
            events.append(event._replace(peak=most, peak_without_grads=most_without_gradients))
            most = most_without_gradients = 0
    assert len(events) < len(plan.memory_events)
    for accumulation in (1, 2):
        train = TrainParams(accumulation=accumulation)
        walk, without = step_walk(plan, train), step_walk(replace(plan, memory_events=tuple(events)), train)
        assert walk.peak.bytes == without.peak.bytes and walk.gathers == without.gathers
        assert walk.without_activations.bytes == without.without_activations.bytes
        assert {plan.units[order].name for _, order in walk.gathers} == {"0.0", "2.0"}


class ReduceInputs:
    """Notes the bytes of an earlier reduce-scatter's input that are held when one begins."""

    def __init__(self):
        self.held = []

    def note_memory(self, walk, held):
        pass

    def note_collective(self, walk, kind, unit):
        if kind == "reduce-scatter":
            self.held.append(walk.reduce_input)


@pytest.mark.parametrize("frees", [True, False])
def test_a_frozen_layer_frees_the_input_of_the_last_reduction_where_torch_does(frees, monkeypatch):
    monkeypatch.setattr(memory_events, "every_backward_frees_reduce_input", lambda: frees)
    for frozen_policy in ("SHARD", "REPLICATE"):
        plan = planned(layers(True, False, True), frozen_policy=frozen_policy)
        inputs = ReduceInputs()
        step_walk(plan, TrainParams(accumulation=2), recorder=inputs)
        is_freed = frees and frozen_policy == "SHARD"  # FSDP2 has no parameters of a replicated layer
        assert inputs.held == [0, 0 if is_freed else 4 * WIDTH**2]


def test_a_language_model_with_its_embedding_is_not_checkpointed_as_a_whole():
    by_size = {"auto_wrap_policy": "SIZE_BASED_WRAP", "frozen_dtype": "nf4", "activation_checkpointing": "all"}
    assert Case("projector", by_size).plan(2).memory_events
    with pytest.raises(ParamError, match="activation_checkpointing: 'language_model' checkpoints a module that"):
        Case("projector", {"activation_checkpointing": "language_model"}).plan(2)
