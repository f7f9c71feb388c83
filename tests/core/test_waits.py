"""In a step of ours the host never waits for a GPU: seen on tensors that pretend to be on one (pretend_cuda.py)."""

import copy
from dataclasses import replace

import pytest
import torch
from pretend_cuda import CUDA, Event, PretendCuda, Waits, backward_by_hand, pretend
from tiny import tiny_batch, tiny_flamingo

from mmfsdp.checkpoint.saving import copy_to_host
from mmfsdp.core.model_record import record_of
from mmfsdp.core.precision import cast_inputs
from mmfsdp.core.quantize import quantize_model
from mmfsdp.core.recompute import checkpoint_activations
from mmfsdp.core.step import train_step
from mmfsdp.kit.train.features import FeatureCache
from mmfsdp.kit.train.optimizer import Scaler, build_optimizer
from mmfsdp.params import FSDPParams, TrainParams

FORMS = ("fp32", "bf16", "fp16", "int8", "nf4")


@pytest.fixture(autouse=True)
def no_driver(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)


def steps(form, accumulation, *, recompute):
    """Return what waits in a step, and the step's metrics, on the pretended GPU and on the CPU."""
    model = tiny_flamingo()
    if form in ("int8", "nf4"):
        quantize_model(model, FSDPParams(frozen_dtype=form, backend="DDP", sharding_strategy="NO_SHARD"))
    if recompute:
        checkpoint_activations(model, FSDPParams(activation_checkpointing="all"))
    dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(form, torch.bfloat16)
    model.to(dtype)
    batches = [replace(tiny_batch(2, seed=i), attention_mask=None) for i in range(accumulation)]
    waits = Waits()
    metrics = []
    for device in (CUDA, torch.device("cpu")):
        with waits, backward_by_hand():
            scaler = Scaler(device) if form == "fp16" else None
            trained = pretend(model) if device == CUDA else copy.deepcopy(model)
            record_of(trained).first_step_checked = True  # the first step's lint reads values
            trained.register_forward_pre_hook(lambda m, a, k: cast_inputs(dtype, m, a, k), with_kwargs=True)
            optimizer, schedule = build_optimizer(trained, TrainParams())
            for _ in range(2):
                waits.found.clear()  # the first step makes the optimizer's states
                pinned = [batch.pin_memory() for batch in batches]  # as the loader does
                metrics.append(
                    train_step(trained, pinned, optimizer, schedule=schedule, max_grad_norm=1.0, scaler=scaler)
                )
            if device == CUDA:
                found = dict(waits.found)
                assert all(isinstance(p.data, PretendCuda) for p in trained.parameters())
    return found, metrics[1], metrics[3]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_a_step_waits_for_nothing(form, accumulation, recompute):
    found, on_gpu, on_cpu = steps(form, accumulation, recompute=recompute)
    # transformers' Llama looks for sequences packed in one row, by their positions, once in a forward.
    of_transformers = [place for place in found if "(transformers/" in place]
    assert [found.pop(place) for place in of_transformers] == [accumulation]
    assert "masking_utils.py" in of_transformers[0]
    assert found == {}
    # It computed what the CPU computes; the order of sums differs.
    assert on_gpu.to_dict() == pytest.approx(on_cpu.to_dict(), rel=1e-6 if form == "fp32" else 2e-2)


def test_the_feature_cache_waits_only_to_write_what_is_new(tmp_path):
    model, batches = tiny_flamingo(), [replace(tiny_batch(2, seed=i), attention_mask=None) for i in range(2)]
    with Waits() as waits, torch.no_grad():
        trained = pretend(model)
        cache = FeatureCache(tmp_path, CUDA)
        pinned = [batch.pin_memory() for batch in batches]
        computed = cache.fill(trained, pinned)
        assert sum(waits.found.values()) == 1 and "blocking copy cuda to cpu" in str(waits.found)
        waits.found.clear()
        cached = cache.fill(trained, pinned)
        outputs = []
        for filled in (computed, cached):
            inputs = [batch.to(CUDA).inputs()["media"] for batch in filled]
            outputs.append([trained(media=media).media_tokens.values for media in inputs])
        assert not waits.found
    assert (cache.encoded, cache.cached) == (4, 4)
    assert all(torch.equal(*pair) for pair in zip(*outputs, strict=True))


def test_a_checkpoint_in_the_background_is_copied_without_a_wait():
    tensors = [torch.randn(3, 4).T, torch.arange(3)]
    with Waits() as waits:
        copies = [copy_to_host(PretendCuda(tensor)) for tensor in tensors]
        assert all(waits.is_pinned(copied) for copied in copies) and not waits.found
    assert all(torch.equal(*pair) for pair in zip(copies, tensors, strict=True))


def test_two_devices_are_refused_as_on_a_gpu():
    gpu, cpu, number = PretendCuda(torch.arange(3.0)), torch.arange(3.0), torch.tensor(2.0)
    index = torch.tensor([0, 2])
    with Waits():
        assert (gpu * number).tolist() == [0, 2, 4]  # a number may be anywhere
        assert gpu[index].tolist() == [0, 2]  # indices are copied, which waits
        for mixed in (
            lambda: gpu + cpu,
            lambda: torch.cat([gpu, cpu]),
            lambda: gpu.index_select(0, index),
            lambda: torch.where(gpu > 1, gpu, cpu),
            lambda: cpu * gpu.sum(),
            lambda: cpu[PretendCuda(index)],
            lambda: torch.nn.functional.embedding(index, gpu[:, None]),
        ):
            with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
                mixed()
