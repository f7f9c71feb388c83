"""A whole run small enough for tests: its parameters, its language model on disk, its pictures; and ranks for it."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmfsdp.checkpoint.steps import drop_after
from mmfsdp.kit import train
from mmfsdp.params import BackboneParams, DataParams, LaunchParams, ModelParams, RunParams, TrainParams

WORDS = ["<unk>", "</s>", "a", "red", "blue", "circle", "square", "two", "small", "large"]
VISION = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 16, "layers": 1, "width": 24, "patch_size": 8, "head_width": 12},
}
LANGUAGE = {"model_type": "gpt2", "vocab_size": 10, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}


def tiny_run(folder: Path, **changes) -> RunParams:
    """Parameters of a run over `folder`'s pictures, written there with its tokenizer and weights.

    The language model has dropout, so that a random state that is not restored shows.
    """
    if not (folder / "pictures").is_dir():
        write_language(folder / "language", LANGUAGE)
        _write_pictures(folder / "pictures")
    params = RunParams(
        model=ModelParams(
            vision=BackboneParams(source="open_clip", config=VISION),
            language=BackboneParams(config=LANGUAGE, weights=str(folder / "language")),
            num_latents=2,
            perceiver_depth=1,
            attention_heads=2,
            attention_head_dim=8,
        ),
        data=DataParams(source="folder", path=str(folder / "pictures"), max_length=16, augment=True),
        train=TrainParams(
            steps=6, batch_size=2, accumulation=2, warmup_steps=2, lr=1e-2, save_every=2, device="cpu", eval_samples=2
        ),
        launch=LaunchParams(folder=str(folder / "runs"), threads=1),
    )
    return params.change(**changes)


def write_language(folder: Path, config: dict[str, Any]) -> None:
    """Write a tokenizer of WORDS and random weights of this configuration."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from mmfsdp.kit.models import build_language

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>").save_pretrained(folder)
    torch.manual_seed(0)
    build_language(BackboneParams(config=config)).save_pretrained(folder)


def _write_pictures(folder: Path) -> None:
    from PIL import Image

    folder.mkdir()
    rows = []
    for i in range(11):
        color = ("red", "blue")[i % 2]
        Image.new("RGB", (20, 20), color).resize((20 + i, 20)).save(folder / f"{i}.png")
        rows.append({"file_name": f"{i}.png", "text": f"a {color} {WORDS[5 + i % 2]}"})
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def as_rank(rank: int, ranks: int, port: int) -> None:
    """Set the environment that `train.run` reads."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")


def train_as_rank(
    rank: int,
    run: Path,
    params: Callable[[], RunParams],
    *,
    port: int,
    ranks: int = 2,
    after: Path | None = None,
    step: int = 2,
) -> str:
    """Train in a run folder that rank 0 makes: a new one, or a copy of the run `after` from that step on.

    Every process calls it, also one whose rank the run does not have. Returns the traceback of this rank; "" without.
    """
    as_rank(rank, ranks, port)
    ready = run.with_name(f"{run.name}.ready")
    if rank == 0:
        if after:
            shutil.copytree(after, run)
            drop_after(run / "checkpoints", step)
        else:
            run.mkdir()
        params().to_yaml(run / "params.yaml")
        ready.touch()
    while not ready.exists():
        time.sleep(0.01)
    try:
        if rank < ranks:
            train.run(run)
    except Exception:
        return traceback.format_exc()
    return ""


PORTS = itertools.count(10_000 + os.getpid() % 60 * 100)
"""Below those that the system hands out, so nobody else gets one before it is used; each process begins elsewhere."""


def free_port() -> int:
    for port in PORTS:
        with socket.socket() as trial:
            if trial.connect_ex(("127.0.0.1", port)):  # nobody listens there
                return port
    raise AssertionError("PORTS never end")


def train_runs(rank: int, _: str, runs: list[str], ports: list[int]) -> None:
    """Train each, as a rank of two."""
    for run, port in zip(runs, ports, strict=True):
        as_rank(rank, 2, port)
        train.run(Path(run))
