"""The memory events of a micro-step, and the peak that follows from them."""

import pytest
import torch
from torch import nn

from mmfsdp.core.trace import fake_mode, fake_model, fake_tensor
from mmfsdp.estimate.make_plan import make_plan
from mmfsdp.estimate.memory import memory_at_rest, step_walk
from mmfsdp.estimate.memory_events import record_memory
from mmfsdp.params import FSDPParams, ParamError, TrainParams
from tests.bench.peaks import Case
from tests.tiny import tiny_batch, tiny_flamingo

WIDTH = 64


def layers(*trainable: bool) -> nn.Sequential:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)) for _ in trainable))
    for layer, trains in zip(model, trainable, strict=True):
        layer.requires_grad_(trains)
    return model


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
    by_size = FSDPParams(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=WIDTH)
    plan = make_plan(model, by_size, world_size=2, example=example)
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


def test_a_language_model_with_its_embedding_is_not_checkpointed_as_a_whole():
    by_size = {"auto_wrap_policy": "SIZE_BASED_WRAP", "frozen_dtype": "nf4", "activation_checkpointing": "all"}
    assert Case("projector", by_size).plan(2).memory_events
    with pytest.raises(ParamError, match="activation_checkpointing: 'language_model' checkpoints a module that"):
        Case("projector", {"activation_checkpointing": "language_model"}).plan(2)
