"""The three examples of Cornstarch's page on DDP and FSDP, line by line as they stand there, on two real ranks.

What differs from the page, in all three:

- The classes come from mmfsdp. The page names Cornstarch's ModalEncoderModule, which is VisionEncoder here.
- Weights are small and random (`from_pretrained` would download them), and the device is the CPU.
- The ranks of a test have a process group from the start. The page makes it after the model, in its FSDP2 example even
  after `fully_shard`, which needs it.
- `inputs` is not defined on the page. CLIPImageProcessor makes its pixel_values; its token ids are random. The page's
  MultimodalModelProcessor is not defined in Cornstarch, nor is `text_processor` on the page.
- The step at the end of each example runs three times, so that its effect can be seen.

The other differences are in comments that begin with "Page:".
"""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FSDPModule,
    FullyShardedDataParallel,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.adam import Adam
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.clip import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel
from transformers.models.clip.modeling_clip import CLIPEncoderLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from mmfsdp.kit.models import MultimodalModel
from mmfsdp.kit.models import VisionEncoder as ModalEncoderModule
from tests.ranks import fake_group, on_ranks

SIZES = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION = CLIPVisionConfig(image_size=16, patch_size=8, **SIZES)
LANGUAGE = LlamaConfig(vocab_size=40, num_key_value_heads=2, **SIZES)


def from_pretrained() -> tuple[CLIPVisionModel, nn.Module]:
    """Return a CLIP and a Llama, the same ones on every rank and in every call."""
    torch.manual_seed(0)
    return CLIPVisionModel(VISION), AutoModelForCausalLM.from_config(LANGUAGE)


def page_model(dtype: torch.dtype) -> MultimodalModel:
    """Return the model of the first example."""
    vision_encoder, language_model = from_pretrained()
    return MultimodalModel(
        encoders={"vision": vision_encoder},
        language_model=language_model,
    ).to(dtype=dtype, device="cpu")


def inputs_of(rank: int) -> dict[str, torch.Tensor]:
    """Return two samples: one has a picture, the other has two. Their texts are equally long."""
    generator = np.random.default_rng(rank)
    pictures = list(generator.integers(0, 255, (3, 20, 24, 3), dtype=np.uint8))
    image_processor = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=16)
    pixel_values = image_processor(pictures, return_tensors="pt")["pixel_values"]
    placeholder, tokens = LANGUAGE.vocab_size, (16 // 8) ** 2
    text = torch.from_numpy(generator.integers(1, 40, (2, 7)))
    short = [*[placeholder] * tokens, *text[0].tolist(), *[0] * tokens]
    long = [*[placeholder] * 2 * tokens, *text[1].tolist()]
    input_ids = torch.tensor([short, long])
    padding = torch.zeros_like(input_ids, dtype=torch.bool)
    padding[0, -tokens:] = True
    # As in Cornstarch's own examples, the labels are the ids: the model leaves out the placeholders.
    labels = input_ids.masked_fill(padding, -100)
    return {
        "pixel_values": pixel_values,
        "input_ids": input_ids,
        "attention_mask": (~padding).long(),
        "labels": labels,
    }


def ddp(dtype: torch.dtype) -> tuple[nn.Module, Adam]:
    model = page_model(dtype)
    ddp_model = DistributedDataParallel(model)
    optimizer = Adam(ddp_model.parameters())
    return ddp_model, optimizer


def fsdp1(dtype: torch.dtype) -> tuple[nn.Module, Adam]:
    model = page_model(dtype)
    MultimodalProjector = type(model.vision_encoder.projector)  # noqa: N806  # Page: not imported
    fsdp_model = FullyShardedDataParallel(
        module=model,
        auto_wrap_policy=ModuleWrapPolicy(
            [
                ModalEncoderModule,
                MultimodalProjector,
                torch.nn.Embedding,
                CLIPEncoderLayer,
                LlamaDecoderLayer,
            ]
        ),
        sharding_strategy=ShardingStrategy.FULL_SHARD,  # Page: ShardingStrateegy
        cpu_offload=CPUOffload(),
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        forward_prefetch=True,
        device_id=torch.device("cpu"),  # Page: the current GPU
    )
    optimizer = Adam(fsdp_model.parameters())
    return fsdp_model, optimizer


def fsdp2(dtype: torch.dtype) -> tuple[nn.Module, Adam]:
    vision_encoder, language_model = from_pretrained()
    for layer in vision_encoder.encoder.layers:  # Page: vision_encoder.vision_model, which transformers 5 has no more
        fully_shard(layer)
    fully_shard(vision_encoder)  # Page: vision_encoder.vision_model

    for layer in language_model.model.layers:
        fully_shard(layer)

    model = MultimodalModel(
        encoders={"vision": vision_encoder},
        language_model=language_model,
    ).to(dtype=dtype, device="cpu")

    fully_shard(model.vision_encoder.projector)
    fsdp_model = fully_shard(model)
    optimizer = Adam(fsdp_model.parameters())
    return fsdp_model, optimizer


EXAMPLES = {"DDP": ddp, "FSDP1": fsdp1, "FSDP2": fsdp2}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # the page computes in bf16, which rounds


def train(model: nn.Module, optimizer: Adam, batches: list[dict]) -> list[float]:
    """Take three steps; return the losses before each."""
    losses = []
    for _ in range(3):
        loss = torch.stack([model(**inputs).loss for inputs in batches]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run_the_examples() -> dict:
    plain = page_model(torch.float32)
    results: dict = {"one process": train(plain, Adam(plain.parameters()), [inputs_of(0), inputs_of(1)])}
    for name, example in EXAMPLES.items():
        for dtype_name, dtype in DTYPES.items():
            model, optimizer = example(dtype)
            losses = torch.tensor(train(model, optimizer, [inputs_of(dist.get_rank())]))
            dist.all_reduce(losses)
            units = [type(m).__name__ for m in model.modules() if isinstance(m, (FullyShardedDataParallel, FSDPModule))]
            results[f"{name} {dtype_name}"] = {
                "losses": (losses / 2).tolist(),
                "units": len(units),
                "all sharded": all(isinstance(p, DTensor) for p in model.parameters()),
            }
    return results


@pytest.fixture(scope="module")
def results():
    return on_ranks(run_the_examples, 2)[0]


@pytest.mark.real
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_trains_as_one_process_does(results, name):
    alone = results["one process"]
    assert alone[2] < alone[0]
    assert results[f"{name} fp32"]["losses"] == pytest.approx(alone, rel=1e-4)
    assert results[f"{name} bf16"]["losses"] == pytest.approx(alone, rel=0.02)


@pytest.mark.real
def test_the_units_are_those_of_the_page(results):
    # FSDP1: the root; the encoder, its two layers and its embedding of positions; the projector; the embedding of words
    # and the two layers of the decoder. FSDP2's page makes no units of embeddings.
    assert results["FSDP1 bf16"]["units"] == 1 + (1 + 2 + 1) + 1 + (1 + 2)
    assert results["FSDP2 bf16"]["units"] == 1 + (1 + 2) + 1 + 2
    assert results["FSDP2 bf16"]["all sharded"]
    assert not results["DDP bf16"]["all sharded"]


def test_shards_of_an_encoder_stay_what_they_are_while_a_model_is_built_around_them():
    with fake_group(2):
        vision, language = from_pretrained()
        for layer in vision.encoder.layers:
            fully_shard(layer)
        fully_shard(vision)
        shards = dict(vision.named_parameters())
        model = MultimodalModel({"vision": vision}, language)
        plain = page_model(torch.float32)
        assert model.num_tokens == plain.num_tokens == {"vision": 4}
        assert model.encoders["vision"].dim == plain.encoders["vision"].dim == 24
        assert model.vision_encoder.encoder.visual is vision
        assert all(p is shards[name] and isinstance(p, DTensor) for name, p in vision.named_parameters())


def test_what_cannot_be_measured_once_wrapped_is_refused_by_name():
    with fake_group(2):
        for wrap in (DistributedDataParallel, lambda m: FullyShardedDataParallel(m, device_id=torch.device("cpu"))):
            vision, language = from_pretrained()
            with pytest.raises(ValueError, match="encoders.vision: .* is no vision model of transformers"):
                MultimodalModel({"vision": wrap(vision)}, language)
        vision, language = from_pretrained()
        vision = ModalEncoderModule(vision, image_size=16)
        with pytest.raises(ValueError, match="visual is wrapped already; build the whole model, then wrap it"):
            ModalEncoderModule(fully_shard(vision), image_size=16)
