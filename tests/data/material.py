"""A small real tokenizer, the photographs and their captions, and writers of pictures and metadata."""

import io
import json
from pathlib import Path

from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from mmfsdp.kit.data import Sample, open_source
from mmfsdp.params import DataParams

PHOTOGRAPHS = Path(__file__).resolve().parent.parent / "files" / "photographs"
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def make_tokenizer(words: str = "a red dog is", **special: str) -> PreTrainedTokenizerFast:
    known = dict.fromkeys(["[UNK]", *special.values(), *words.split()])
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    if "bos_token" in special:
        bos = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", **special)


def captions() -> dict[str, str]:
    lines = (PHOTOGRAPHS / "metadata.jsonl").read_text().splitlines()
    return {row["file_name"]: row["text"] for row in map(json.loads, lines)}


def write_metadata(folder: Path, rows: list[dict | str]) -> None:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    with (folder / "metadata.jsonl").open("a") as file:
        file.write("\n".join(lines) + "\n")


def picture_bytes(color: str | tuple = "red", size: tuple[int, int] = (12, 10), mode: str = "RGB", kind="PNG") -> bytes:
    out = io.BytesIO()
    Image.new(mode, size, color).save(out, kind)
    return out.getvalue()


def both(path, source="folder", **changes) -> tuple[list[Sample], list[Sample], dict[str, str]]:
    """The train and the heldout part, and what was skipped and why."""
    params = DataParams(source=source, path=str(path), **changes)
    parts = [open_source(params, split=split, image_size=32) for split in ("train", "heldout")]
    train, heldout = [list(part) for part in parts]
    return train, heldout, parts[0].skipped | parts[1].skipped
