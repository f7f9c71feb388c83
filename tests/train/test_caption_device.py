"""Captions are made where their run trains, and in its precision: on the GPU if there is one, and the model fits."""

import copy

import pytest
import torch
from PIL import Image
from tiny import tiny_batch, tiny_flamingo
from torch import nn

from mmfsdp import RunParams
from mmfsdp.core.quantize import quantize_model
from mmfsdp.kit.data import Sample
from mmfsdp.kit.models.build import build_model
from mmfsdp.kit.train import evaluate
from mmfsdp.kit.train.evaluate import caption_device, captions, computing_in, on_run_device
from mmfsdp.params import FSDPParams, ModelParams
from mmfsdp.params.in_words import size
from tests.tiny_vlms import FAMILIES, save_vlm

CPU = torch.device("cpu")


@pytest.fixture
def gpu(monkeypatch):
    """Sets the bytes that are free on a GPU that seems to be there, the second of this machine."""

    def has(free: int) -> None:
        seems = {"is_available": True, "current_device": 1, "mem_get_info": (free, 2 * free), "empty_cache": None}
        for name, value in seems.items():
            monkeypatch.setattr(torch.cuda, name, lambda value=value: value)

    return has


def test_captions_are_made_on_the_gpu_if_the_run_is_for_one_and_the_model_fits(gpu, capsys):
    model = nn.Linear(1000, 250, bias=False)  # a million bytes in fp32
    auto = RunParams()
    assert caption_device(model, auto) == CPU, "this machine has no GPU"
    gpu(1_200_000)
    assert str(caption_device(model, auto)) == "cuda:1"
    assert caption_device(model, auto.change(**{"train.device": "cpu"})) == CPU
    assert not capsys.readouterr().out
    gpu(1_000_000)
    assert caption_device(model, auto) == CPU
    assert f"on the CPU: on the GPU the model needs {size(1_000_000)} for its weights" in capsys.readouterr().out
    assert str(caption_device(model, auto.change(**{"fsdp.mixed_precision": "bf16"}))) == "cuda:1", "half as many"


def test_on_the_cpu_a_model_stays_as_it_is():
    model = nn.Linear(2, 2)
    with on_run_device(model, RunParams().change(**{"fsdp.mixed_precision": "bf16"})) as name:
        assert name == "cpu" and model(torch.ones(2)).dtype is model.weight.dtype is torch.float32


def test_a_module_of_somebodys_own_takes_pictures_in_fp32():
    """transformers' encoders cast pictures themselves; others need not."""
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    for dtype in (torch.bfloat16, torch.float16):
        with computing_in(model, CPU, dtype), torch.no_grad():
            assert model(torch.ones(1, 2)).isfinite().all() and model[0].weight.dtype is dtype


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_answers_in_the_precision_of_its_run(family, tmp_path):
    """What it computes in 16 bits is what it computes in 32, but for their digits."""
    folder = str(save_vlm(family, tmp_path / "model"))
    model, processor = build_model(ModelParams(kind="transformers", name=folder, weights=folder))
    model.eval()
    picture = Image.new("RGB", (28, 28), "red")
    samples = [
        Sample.of("<image> what is it", "red", (picture,)),
        Sample.of("<image> and what is this", "red", (picture,)),
    ]
    inputs = processor.prompts(samples).inputs()
    check_in_16_bits(model, inputs)
    with computing_in(model, CPU, torch.bfloat16):
        assert len(captions(model, processor, samples)) == 2


@pytest.mark.parametrize("form", [None, "int8", "nf4"])
def test_a_flamingo_computes_in_the_precision_of_its_run(form):
    model = tiny_flamingo().eval()
    if form:
        quantize_model(model, FSDPParams(frozen_dtype=form, backend="DDP", sharding_strategy="NO_SHARD"))
    check_in_16_bits(model, tiny_batch(2).inputs())


@torch.no_grad()
def check_in_16_bits(model, inputs):
    """Compare logits in fp32 with those in bf16 and fp16, and look at what was cast."""
    in_fp32 = model(**inputs).logits
    for dtype, tolerance in {torch.bfloat16: 0.1, torch.float16: 0.02}.items():
        moved = copy.deepcopy(model)
        buffers = {name: buffer.dtype for name, buffer in moved.named_buffers()}
        with computing_in(moved, CPU, dtype):
            logits = moved(**inputs).logits.float()
        assert {p.dtype for p in moved.parameters() if p.is_floating_point()} == {dtype}
        assert {name: buffer.dtype for name, buffer in moved.named_buffers()} == buffers
        difference = (logits - in_fp32).norm() / in_fp32.norm()
        assert 0 < difference < tolerance


def test_prompts_that_a_gpu_has_no_memory_for_are_answered_by_fewer(monkeypatch):
    answered = []

    def generate(model, processor, samples):
        if len(samples) > 15:
            raise torch.OutOfMemoryError
        answered.append(len(samples))
        return None, samples

    class Reader:
        decode = staticmethod(list)

    monkeypatch.setattr(evaluate, "generate", generate)
    samples = [str(i) for i in range(60)]
    assert captions(None, Reader, samples) == samples and answered == [12] * 5
    monkeypatch.setattr(evaluate, "generate", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError()))
    with pytest.raises(torch.OutOfMemoryError):
        captions(None, Reader, samples)
