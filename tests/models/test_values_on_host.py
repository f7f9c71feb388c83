"""What Qwen-VL's forward would read from a GPU comes with the batch: the same numbers, and nothing is read for them."""

import copy
import json
import pickle
from dataclasses import replace

import pytest
import torch
import transformers
from pretend_cuda import CUDA, Event, Waits, backward_by_hand, pretend
from torch.distributed.utils import _to_kwargs

from mmfsdp.core.freeze import freeze
from mmfsdp.core.model_record import record_of
from mmfsdp.core.recompute import checkpoint_activations
from mmfsdp.core.step import train_step
from mmfsdp.kit.data.chat import AsIs
from mmfsdp.kit.models.build import build_model
from mmfsdp.kit.models.values_on_host import NUMBERED, READS_NO_GRID, WITH_LENGTHS, GivenValues, unwrap
from mmfsdp.kit.train.optimizer import build_optimizer
from mmfsdp.kit.train.prepare import preview
from mmfsdp.params import FSDPParams, ModelParams, RunParams, TrainParams
from tests import families
from tests.bench import waits
from tests.families import thirds
from tests.models.test_from_transformers import ONE, TEXT, TURNS
from tests.tiny_vlms import save_vlm

MASKS = {"no mask": None, "padded": torch.ones(2, 24, dtype=torch.long)}
MASKS["padded"][1, 15:] = 0
PICTURES = {"one each": (1, 1), "two and none": (2, 0), "none and one": (0, 1)}


def batch_of(name: str, pictures: tuple[int, int], mask) -> dict[str, torch.Tensor]:
    """A batch of the family in which the two samples have so many pictures, and text before, between and after."""
    inputs = families.Inputs(name).inputs() | {"attention_mask": mask}
    ids = inputs["input_ids"].masked_fill(inputs["input_ids"] == families.IMAGE, 5)
    for row, count in enumerate(pictures):
        for picture in range(count):
            ids[row, 2 + 6 * picture : 6 + 6 * picture] = families.IMAGE
    for key in ("mm_token_type_ids", "moe_mm_token_type_ids"):
        if key in inputs:
            inputs[key] = (ids == families.IMAGE).long()
    count = sum(pictures)
    grid, pixels = inputs["image_grid_thw"][:count], inputs["pixel_values"]
    inputs["pixel_values"] = pixels[: len(pixels) * count // len(inputs["image_grid_thw"])]
    inputs |= {"input_ids": ids, "image_grid_thw": grid, "labels": ids.masked_fill(ids == families.IMAGE, -100)}
    return {key: value for key, value in inputs.items() if value is not None}


@pytest.fixture(scope="module", params=NUMBERED)
def family(request):
    """Name, model and its GivenValues, as a data worker gets them."""
    model = families.build(request.param).eval()
    return request.param, model, pickle.loads(pickle.dumps(GivenValues(model)))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("pictures", PICTURES)
def test_loss_and_logits_are_those_without_the_given_values(family, pictures, mask):
    name, model, given = family
    inputs = batch_of(name, PICTURES[pictures], MASKS[mask])
    values = given({key: value for key, value in inputs.items() if key != "labels"})
    assert values["position_ids"].shape == (3, *inputs["input_ids"].shape)
    assert ("image_cu_seqlens" in values) == (name in WITH_LENGTHS)
    computed = []
    for module in model.modules():
        if hasattr(module, "compute_3d_position_ids"):
            real = module.compute_3d_position_ids
            module.compute_3d_position_ids = lambda *a, real=real, **k: computed.append(1) or real(*a, **k)
    plain = model(**inputs, use_cache=False)
    assert computed == [1]
    with_values = model(**inputs, **values, use_cache=False)
    assert computed == [1]  # not computed again
    for module in model.modules():
        vars(module).pop("compute_3d_position_ids", None)
    assert torch.equal(plain.logits, with_values.logits) and torch.equal(plain.loss, with_values.loss)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def chat(request, tmp_path_factory):
    folder = save_vlm(request.param, tmp_path_factory.mktemp("vlm") / request.param)
    return folder, *build_model(ModelParams(kind="transformers", name=str(folder), lora_rank=2))


@pytest.mark.parametrize("samples", [(TEXT,), (ONE,), (TEXT, ONE, TURNS), ()], ids=["text", "one", "three", "none"])
@pytest.mark.parametrize("max_length", [400, 100])
def test_a_batch_of_the_processor_has_them_and_prompts_have_not(chat, samples, max_length):
    _, model, processor = chat
    processor = replace(processor, max_length=max_length)
    batch = processor(samples)
    plain = replace(processor, given_values=None)(samples)
    added = batch.media.keys() - plain.media.keys()
    assert added >= {"position_ids", "image_position_ids", "image_cu_seqlens"} and batch.skipped == plain.skipped
    assert batch.media["position_ids"].shape[1:] == batch.input_ids.shape
    model.eval()
    with torch.no_grad():
        wanted, found = model(**plain.inputs()), model(**batch.inputs())
    assert torch.equal(wanted.logits, found.logits)
    torch.testing.assert_close(wanted.loss, found.loss, rtol=0, atol=0, equal_nan=True)  # no sample, no label
    assert not any(isinstance(value, AsIs) for value in batch.inputs().values())  # on one device nothing is special
    assert not processor.prompts([ONE]).media.keys() & added and not processor.prompts([ONE]).on_host


def test_what_is_read_stays_on_the_host_through_the_wrappers(chat):
    _, model, processor = chat
    batch = replace(processor, max_length=400)([ONE, TURNS])
    meta = torch.device("meta")  # stands for a GPU
    inputs = batch.to(meta).inputs()
    wrapped = {name for name, value in inputs.items() if isinstance(value, AsIs)}
    lengths = {"image_cu_seqlens", "image_cu_window_seqlens", "image_grid_thw"}
    assert wrapped == (lengths if model.config.model_type in READS_NO_GRID else {"image_cu_seqlens"})
    # DDP, FSDP1 and FSDP2 move tensors by this function; in the model the hook takes them out again.
    _, (moved,) = _to_kwargs((), inputs, meta, False)
    _, unwrapped = unwrap(model, (), moved)
    for name, value in unwrapped.items():
        if isinstance(value, torch.Tensor):
            assert value.device.type == ("cpu" if name in wrapped else "meta")
    assert any(hook is unwrap for hook in model._forward_pre_hooks.values())
    flash = copy.deepcopy(model)
    flash.config.vision_config._attn_implementation = "flash_attention_2"  # its kernel takes lengths on the GPU
    assert not GivenValues(flash).on_host


def test_a_plan_pads_the_positions_of_its_example(chat):
    folder = chat[0]
    run = RunParams(model=ModelParams(kind="transformers", name=str(folder), lora_rank=2), data={"max_length": 200})
    plan, cost = preview(run)
    assert plan.memory_events and cost.peak_bytes


@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_on_a_gpu_reads_nothing_in_the_layers(chat, recompute, monkeypatch):
    """From the loader's pinned batches to the optimizer, with another device refused; and it is the CPU's step."""
    _, model, processor = chat
    monkeypatch.setattr(torch.cuda, "Event", Event)
    model = copy.deepcopy(model)
    freeze(model, ["*", "!*merger*"])
    if recompute:
        checkpoint_activations(model, FSDPParams(activation_checkpointing="all"))
    batch = replace(processor, max_length=400)([ONE, TURNS])
    steps = []
    waits = Waits()
    for device in (CUDA, torch.device("cpu")):
        with waits, backward_by_hand(), torch.backends.cudnn.flags(enabled=False):
            trained = pretend(model) if device == CUDA else copy.deepcopy(model)
            record_of(trained).first_step_checked = True  # the first step's lint reads values
            optimizer, schedule = build_optimizer(trained, TrainParams())
            for _ in range(2):
                waits.found.clear()  # the first step makes the optimizer's states
                steps.append(train_step(trained, [batch.pin_memory()], optimizer, schedule=schedule))
            if device == CUDA:
                found = dict(waits.found)
    assert steps[1].to_dict() == pytest.approx(steps[3].to_dict(), rel=1e-4)
    # Backward, which the step calls, runs what transformers' forward has recorded.
    ours = [place for place in found if "(mmfsdp/" in place and ".backward()" not in place]
    assert not ours and not any("get_rope_index" in place for place in found), found
    assert not any("lengths.tolist()" in place for place in found), found
    if model.config.model_type in READS_NO_GRID:
        assert [place.partition(" (")[2][:23] for place in found] == ["utils/import_utils.py:1"]


STORED = json.loads(waits.STORED.read_text())


@pytest.mark.parametrize("name", thirds(waits.trained_families(), 1))
def test_the_page_lists_what_transformers_reads(name):
    """`python -m tests.bench.waits` writes the list anew. Tensors on two devices are refused, as on a GPU."""
    found, on_gpu, on_cpu = waits.forward(name)
    if transformers.__version__ == STORED["transformers"]:  # another version may read more or less
        assert waits.by_file(found) == STORED["families"][name]
    torch.testing.assert_close(on_gpu.logits.values, on_cpu.logits, rtol=1e-4, atol=1e-4)
    if name in READS_NO_GRID:
        assert sum(found.values()) == 1
    if name in NUMBERED:
        assert not any("get_rope_index" in words or "compute_3d" in words for words in found)


def test_every_family_is_listed():
    assert list(STORED["families"]) == waits.trained_families()
