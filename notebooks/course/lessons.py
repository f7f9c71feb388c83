"""Material that several lessons share."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmfsdp import BackboneParams, DataParams, LaunchParams, ModelParams, Run, RunParams, TrainParams, launch
from mmfsdp.kit.widgets.ranks_cell.ranks_magic import artifacts
from mmfsdp.params import BackboneSource


def small_flamingo(width: int = 64, *, gates: float | None = None) -> tuple[nn.Module, dict[str, Any]]:
    """A Flamingo of random weights, frozen as usual, and the inputs of one batch; the same on each call and rank."""
    from mmfsdp.kit.bench.bench_models import flamingo_batch, model_params, random_model

    model = random_model(model_params(width))
    for name, p in model.named_parameters():
        if gates is not None and name.endswith("_gate"):
            p.data.fill_(gates)
    return model, flamingo_batch(seed=0).inputs()


def small_projector_model(width: int = 64) -> tuple[nn.Module, dict[str, Any]]:
    """A model of encoder, projector and language model, of which only the projector trains, and one batch's inputs."""
    from mmfsdp.kit.bench.bench_models import PICTURE_PIXELS, TOKENS, WORDS, model_params, random_batch, random_model

    flamingo = model_params(width, layers=8)
    params = ModelParams(kind="multimodal", vision=flamingo.vision, language=flamingo.language)
    batch = random_batch(WORDS, WORDS, (2, TOKENS), PICTURE_PIXELS, seed=0, placeholders=4)
    return random_model(params), batch.inputs()


def confident_flamingo() -> tuple[nn.Module, dict[str, Any]]:
    """A small Flamingo whose head is as confident as a trained one's, and one batch: a random head says all softly."""
    model, example = small_flamingo()
    for name, p in model.named_parameters():
        if name.endswith("lm_head.table.weight"):
            p.data *= 20
    return model, example


def encoder_plan(layer_class: str) -> Any:
    """The plan of a 12-layer encoder of which layers of this class become units."""
    from mmfsdp import FSDPParams, make_plan

    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(768, 12, batch_first=True)
        model = nn.TransformerEncoder(layer, 12)
    layers = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls": layer_class}
    return make_plan(model, FSDPParams(**layers), world_size=8)


@cache
def frozen(preset: str) -> nn.Module:
    """A preset's model on the meta device, frozen as it would be trained."""
    from mmfsdp.kit.train.prepare import frozen_model
    from mmfsdp.params import load

    return frozen_model(load(preset).model)[0]


@cache
def planned(preset: str, ranks: int, **fields: Any) -> Any:
    """The plan of a preset's model on so many ranks, in bf16, on the meta device."""
    from mmfsdp import FSDPParams, make_plan

    precision = {"mixed_precision": "bf16", "frozen_dtype": "bf16"}
    return make_plan(frozen(preset), FSDPParams(**(precision | fields)), world_size=ranks)


def waits(preset: str = "openflamingo_9b", *, tokens: int = 512, machine: str = "h100-infiniband") -> dict[str, Any]:
    """Milliseconds of a step on paper, by GPUs and frozen policy: compute, and exposed communication."""
    from mmfsdp.predict import on_mesh, step_time

    plans = {policy: planned(preset, 8, frozen_policy=policy) for policy in ("SHARD", "KEEP", "REPLICATE")}
    rows = {}
    for ranks in (8, 64, 1024):
        for policy, plan in plans.items():
            times = step_time(on_mesh(plan, 1, ranks), machine=machine, tokens=tokens)
            busy = times.local
            rows[f"{ranks:,} GPUs, {policy}"] = {"compute": 1e3 * busy, "exposed": 1e3 * (times.overlapped - busy)}
    return rows


WORDS = ["<unk>", "</s>", "a", "red", "blue", "circle", "square", "two"]
LANGUAGE = {"vocab_size": len(WORDS), "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
LANGUAGE |= {"bos_token_id": 1, "eos_token_id": 1}


def small_run(**changes: Any) -> RunParams:
    """Parameters of a run of seconds over a dozen pictures that are drawn here, with dropout and augmentation."""
    folder = artifacts("small_parts")
    if not (folder / "pictures" / "metadata.jsonl").is_file():
        _write_parts(folder)
    tower = {"image_size": 16, "layers": 1, "width": 24, "patch_size": 8, "head_width": 12}
    small = {"num_latents": 2, "perceiver_depth": 1, "attention_heads": 2, "attention_head_dim": 8}
    params = RunParams(
        model=ModelParams(
            vision=BackboneParams(source=BackboneSource.OPEN_CLIP, config={"embed_dim": 16, "vision_cfg": tower}),
            language=BackboneParams(config={"model_type": "gpt2"} | LANGUAGE, weights=str(folder / "language")),
            **small,
        ),
        data=DataParams(source="folder", path=str(folder / "pictures"), max_length=16, augment=True),
        train=TrainParams(
            steps=8, batch_size=2, lr=1e-2, schedule="constant", warmup_steps=2, save_every=2, device="cpu"
        ),
        launch=LaunchParams(folder=str(artifacts("runs")), threads=1),
    )
    return params.change(**changes)


def train(params: RunParams, name: str, *, until: int | None = None) -> Run:
    """Launch a run under this name, in place of an older one, and wait for its end, or that of step `until`."""
    steps = {"train.steps": until} if until else {}
    run = launch(params.change(**{"launch.name": name, "launch.replace": True, **steps}))
    run.wait()
    return run


def _write_parts(folder: Path) -> None:
    """A tokenizer, a language model of random weights, and pictures of one color each."""
    from PIL import Image
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>")
    tokenizer.save_pretrained(folder / "language")
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(**LANGUAGE)).save_pretrained(folder / "language")
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    rows = []
    for i in range(12):
        color = ("red", "blue")[i % 2]
        shade = (255 - i, 0, 0) if color == "red" else (0, 0, 255 - i)  # no two pictures are the same
        Image.new("RGB", (20 + i, 20), shade).save(folder / "pictures" / f"{i}.png")
        rows.append({"file_name": f"{i}.png", "text": f"a {color} {WORDS[5 + i % 2]}"})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "pictures" / "metadata.jsonl").write_text(text, encoding="utf-8")


def arena() -> None:
    """Try the learner's file in the arena, and print its number and levels."""
    from mmfsdp.kit.cli import main

    from .file_parts import own_file
    from .grades import unwritten

    if hint := unwritten("prefetch"):
        print(hint)
        return
    main(["arena", str(own_file())])


def arena_in_4_bits() -> None:
    """Try the learner's file with frozen units in 4 bits in the arena: `pack` and `fill` are those of 11.four_bits."""
    from mmfsdp.kit.cli import main
    from mmfsdp.kit.widgets.ranks_cell.ranks_magic import artifacts

    from .checks import hint_for
    from .file_parts import own_file
    from .four_bits import file_in_4_bits

    if hint := hint_for("11.four_bits"):
        print(hint)
        return
    cell = (artifacts("11.four_bits") / "cell.py").read_text(encoding="utf-8")
    file = own_file().with_name("my_fsdp_4_bits.py")
    file.write_text(file_in_4_bits(own_file().read_text(encoding="utf-8"), cell), encoding="utf-8")
    main(["arena", str(file), "--to", str(file.with_name("arena_4_bits.json"))])
