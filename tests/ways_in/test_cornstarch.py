"""The three examples of Cornstarch's page on DDP and FSDP, its slips mended, with our MultimodalModel and torch's own
calls on two real ranks: who wraps by hand can."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.adam import Adam
from transformers import AutoModelForCausalLM, CLIPVisionConfig, CLIPVisionModel, LlamaConfig
from transformers.models.clip.modeling_clip import CLIPEncoderLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from mmfsdp.models import ModalEncoder, MultimodalModel, VisionEncoder
from tests.ranks import fake_group, on_ranks

IMAGE = 40


def multimodal() -> MultimodalModel:
    """CLIP and Llama as on the page, but small and with random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision_encoder = CLIPVisionModel(CLIPVisionConfig(image_size=16, patch_size=8, **sizes))
    language_model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=IMAGE, num_key_value_heads=2, **sizes))
    encoder = ModalEncoder(VisionEncoder(vision_encoder, image_size=16))
    return MultimodalModel({"vision": encoder}, language_model, placeholders={"vision": IMAGE})


def inputs(rank: int, model: MultimodalModel) -> dict:
    """Two samples of a picture each."""
    g = torch.Generator().manual_seed(rank)
    text = torch.randint(0, IMAGE, (2, 7), generator=g)
    ids = torch.cat([torch.full((2, model.num_tokens["vision"]), IMAGE), text], dim=1)
    media = {"vision": torch.randn(2, 1, 1, 3, 16, 16, generator=g)}
    return {"input_ids": ids, "labels": ids.masked_fill(ids == IMAGE, -100), "media": media}


def ddp(model: MultimodalModel) -> nn.Module:
    return DistributedDataParallel(model, find_unused_parameters=True)  # CLIP's pooled output is not used


def fsdp1(model: MultimodalModel) -> nn.Module:
    policy = ModuleWrapPolicy(
        [VisionEncoder, type(model.projectors["vision"]), nn.Embedding, CLIPEncoderLayer, LlamaDecoderLayer]
    )
    return FullyShardedDataParallel(
        module=model,
        auto_wrap_policy=policy,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        cpu_offload=CPUOffload(),
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        forward_prefetch=True,
        device_id=torch.device("cpu"),
    )


def fsdp2(model: MultimodalModel) -> nn.Module:
    for module in model.modules():
        if isinstance(module, (CLIPEncoderLayer, LlamaDecoderLayer)):
            fully_shard(module)
    fully_shard(model.encoders["vision"])
    fully_shard(model.projectors["vision"])
    return fully_shard(model)


WAYS = {"DDP": ddp, "FSDP1": fsdp1, "FSDP2": fsdp2}


def train(model: nn.Module, batches: list[dict]) -> list[float]:
    """The page's step, three times; losses before each."""
    optimizer = Adam(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        loss = torch.stack([model(**batch).loss for batch in batches]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_every_way() -> dict:
    plain = multimodal()
    batches = [inputs(rank, plain) for rank in range(2)]
    found: dict = {"one process": {"losses": train(plain, batches)}}
    for name, wrap in (WAYS | {f"{name} bf16": wrap for name, wrap in WAYS.items()}).items():
        model = multimodal()
        model = wrap(model.to(torch.bfloat16) if "bf16" in name else model)
        losses = torch.tensor(train(model, [batches[dist.get_rank()]]))
        dist.all_reduce(losses)
        sharded = sum(isinstance(m, FullyShardedDataParallel) for m in model.modules())
        dtensors = all(isinstance(p, DTensor) for p in model.parameters())
        found[name] = {"losses": (losses / 2).tolist(), "FSDP1 units": sharded, "all sharded": dtensors}
    return found


@pytest.fixture(scope="module")
def found():
    return on_ranks(train_every_way, 2)[0]


@pytest.mark.parametrize("name", WAYS)
def test_a_model_wrapped_by_hand_trains_as_in_one_process(found, name):
    alone = found["one process"]["losses"]
    assert found[name]["losses"] == pytest.approx(alone, rel=1e-4) and alone[2] < alone[0]
    assert found[f"{name} bf16"]["losses"] == pytest.approx(alone, rel=0.02)


def test_the_units_are_those_of_the_page(found):
    # the root, the encoder, its layers and its embedding of positions; the projector; the words, the decoder's layers
    assert found["FSDP1"]["FSDP1 units"] == 1 + (1 + 2 + 1) + 1 + (1 + 2)
    assert found["FSDP2"]["all sharded"] and not found["DDP"]["all sharded"]


def test_an_encoder_that_is_sharded_before_the_model_is_built_is_refused_by_name():
    with fake_group(2):
        vision = multimodal().encoders["vision"].visual
        for wrapped in (DistributedDataParallel(vision), fully_shard(vision)):
            with pytest.raises(ValueError, match="visual is wrapped already; build the whole model, then wrap it"):
                VisionEncoder(wrapped, image_size=16)
