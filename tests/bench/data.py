"""`python -m tests.bench.data`: samples per second of one worker for each kind of source, beside plain loops."""

from __future__ import annotations

import base64
import io
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import open_clip
import torch
import webdataset
from PIL import Image, ImageFilter
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mmfsdp.data import Processor, batches
from mmfsdp.models.encoders import CLIP_MEAN, CLIP_STD
from mmfsdp.params import DataParams, DataSource

BATCH = 8
WORDS = "a photograph of one large red circle and two small blue squares on a table"
SOURCES = {
    "folder": {"source": "folder", "path": "."},
    "conversations": {"source": "json", "path": "chats.json"},
    "COCO": {"source": "json", "path": "captions.json"},
    "documents": {"source": "json", "path": "documents.jsonl"},
    "shards": {"source": "webdataset", "path": "captions.tar"},
    "document shards": {"source": "webdataset", "path": "documents.tar"},
}
Loop = Callable[[], Iterator[int]]
"""Gives how many samples it has just read, without end."""


def bench_data(*, image_size: int = 224, pictures: int = 64, side: int = 512, rounds: int = 7) -> dict[str, Any]:
    """Samples per second by source: read (the library and PIL alone), by hand (and preprocessed by torchvision and
    tokenized), mmfsdp (whole batches); and what mmfsdp adds to the loop by hand: the median over rounds."""
    torch.set_num_threads(1)
    tokenizer = _tokenizer()
    processor = Processor(tokenizer, image_size, CLIP_MEAN, CLIP_STD)
    transform = open_clip.image_transform(image_size, is_train=False, mean=CLIP_MEAN, std=CLIP_STD)
    samples, found = max(1, pictures // BATCH) * BATCH, {}
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_sources(folder, pictures, side)
        for kind, fields in SOURCES.items():
            path = folder / fields["path"]
            params = DataParams(source=DataSource(fields["source"]), path=str(path))
            loops: dict[str, Loop] = {
                "read": lambda kind=kind, path=path: _by_hand(kind, path, None, tokenizer),  # type: ignore[misc]
                "by_hand": lambda kind=kind, path=path: _by_hand(kind, path, transform, tokenizer),  # type: ignore[misc]
                "mmfsdp": lambda params=params: (b.size for b in batches(params, processor, batch_size=BATCH)),  # type: ignore[misc]
            }
            found[kind] = _compare({name: loop() for name, loop in loops.items()}, samples, rounds)
    return {"image_size": image_size, "picture_side": side, "rounds": rounds, "sources": found}


def _compare(loops: dict[str, Iterator[int]], samples: int, rounds: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for i in range(rounds + 1):
        for name, loop in loops.items():
            start, done = time.perf_counter(), 0
            while done < samples:
                done += next(loop)
            if i:  # the first round warms up
                seconds[name].append((time.perf_counter() - start) / done)
    added = [ours / theirs - 1 for ours, theirs in zip(seconds["mmfsdp"], seconds["by_hand"], strict=True)]
    rates = {name: 1 / statistics.median(each) for name, each in seconds.items()}
    return rates | {"added": statistics.median(added)}


def _by_hand(kind: str, path: Path, transform: Any, tokenizer: Any) -> Iterator[int]:
    """What one writes without this package; without `transform` it only reads."""
    while True:
        samples = iter(_read(kind, path))
        while batch := list(islice(samples, BATCH)):
            if transform is not None:
                texts = [text for text, _ in batch]
                tokenizer(texts, padding=True, truncation=True, max_length=64, return_tensors="pt")
                torch.stack([transform(image) for _, images in batch for image in images])
            yield len(batch)


def _read(kind: str, path: Path) -> Iterable[tuple[str, list[Image.Image]]]:
    if path.suffix == ".tar":
        for raw in webdataset.WebDataset(str(path), shardshuffle=False).decode("pil"):
            row = raw.get("json")
            yield (raw["txt"], [raw["jpg"].convert("RGB")]) if row is None else _document(row)
        return
    if kind in ("folder", "documents"):
        file = path / "metadata.jsonl" if kind == "folder" else path
        rows: Any = map(json.loads, file.read_text().splitlines())
    else:
        rows = json.loads(path.read_text())
        if kind == "COCO":
            files = {image["id"]: image["file_name"] for image in rows["images"]}
            rows = [{"file_name": files[note["image_id"]], "text": note["caption"]} for note in rows["annotations"]]
    root = path if path.is_dir() else path.parent
    for row in rows:
        if kind == "documents":
            yield _document(row)
        else:
            text = row["text"] if "text" in row else " ".join(turn["value"] for turn in row["conversations"])
            yield text, [Image.open(root / row.get("file_name", row.get("image"))).convert("RGB")]


def _document(row: dict[str, Any]) -> tuple[str, list[Image.Image]]:
    encoded = [base64.b64decode(info["image_base64"]) for info in row["image_info"]]
    return "<image>".join(row["text_list"]), [Image.open(io.BytesIO(data)).convert("RGB") for data in encoded]


def write_sources(folder: Path, count: int, side: int) -> None:
    """The same pictures as every kind of source."""
    rng = np.random.default_rng(0)
    data = []
    for _ in range(count):
        noise = Image.fromarray(rng.integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8))
        picture = noise.resize((side, side), Image.Resampling.BICUBIC).filter(ImageFilter.GaussianBlur(1))
        picture.save(out := io.BytesIO(), "JPEG", quality=90)
        data.append(out.getvalue())
    files = [f"{i:04d}.jpg" for i in range(count)]
    for file, content in zip(files, data, strict=True):
        (folder / file).write_bytes(content)
    rows = [{"file_name": file, "text": WORDS} for file in files]
    chats = [
        {"id": i, "image": file, "conversations": [{"from": "human", "value": "<image>\nWhat is it?"},
                                                   {"from": "gpt", "value": WORDS}]}
        for i, file in enumerate(files)
    ]  # fmt: skip
    coco = {
        "images": [{"id": i, "file_name": file} for i, file in enumerate(files)],
        "annotations": [{"id": i, "image_id": i, "caption": WORDS} for i in range(count)],
    }
    infos = [{"image_base64": base64.b64encode(one).decode(), "matched_sim": 0.3} for one in data]
    documents = [
        {"text_list": [f"{i}", WORDS, WORDS], "image_info": [info | {"matched_text_index": 1 + k} for k, info in
                                                             enumerate((infos[i], infos[i - 1]))]}
        for i in range(count)
    ]  # fmt: skip
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "chats.json").write_text(json.dumps(chats))
    (folder / "captions.json").write_text(json.dumps(coco))
    (folder / "documents.jsonl").write_text("\n".join(map(json.dumps, documents)))
    with webdataset.TarWriter(str(folder / "captions.tar")) as tar:
        for i, one in enumerate(data):
            tar.write({"__key__": f"{i:04d}", "jpg": one, "txt": WORDS})
    with webdataset.TarWriter(str(folder / "documents.tar")) as tar:
        for i, row in enumerate(documents):
            tar.write({"__key__": f"{i:04d}", "json": row})


def _tokenizer() -> PreTrainedTokenizerFast:
    words = {word: i for i, word in enumerate(dict.fromkeys(["[UNK]", *WORDS.split()]))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


def table(found: dict[str, Any]) -> str:
    """The result as text, one line per source."""
    lines = [f"{'samples/s of one worker':<24}{'read':>10}{'by hand':>10}{'mmfsdp':>10}{'added':>9}"]
    for kind, row in found["sources"].items():
        rates = "".join(f"{row[name]:>10.0f}" for name in ("read", "by_hand", "mmfsdp"))
        lines.append(f"{kind:<24}{rates}{row['added']:>+9.0%}")
    note = (
        f"JPEG of {found['picture_side']} pixels for an encoder of {found['image_size']}; medians of {found['rounds']}"
    )
    return "\n".join([*lines, f"{note} interleaved rounds. added: time over the loop by hand."])


if __name__ == "__main__":
    print(table(bench_data()))
