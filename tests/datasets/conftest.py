"""A small real tokenizer, real photographs, and folders and shards made of them."""

import io
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import matplotlib
import pytest
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from mmfsdp.data import Processor

PHOTOGRAPHS = Path(__file__).resolve().parent.parent / "data" / "photographs"
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


@pytest.fixture(scope="session")
def processor() -> Processor:
    return Processor(make_tokenizer(" ".join(captions().values()) + " officer"), 32, CLIP_MEAN, CLIP_STD, max_length=24)


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """An imagefolder of the photographs here, and one from matplotlib in a sub-folder of its own."""
    folder = tmp_path / "photographs"
    shutil.copytree(PHOTOGRAPHS, folder)
    (folder / "people").mkdir()
    shutil.copy(Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg", folder / "people")
    write_metadata(folder / "people", [{"file_name": "grace_hopper.jpg", "text": "an officer in a dark coat"}])
    return folder


def write_metadata(folder: Path, rows: list[dict | str]) -> None:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    with (folder / "metadata.jsonl").open("a") as file:
        file.write("\n".join(lines) + "\n")


def picture_bytes(color: str | tuple = "red", size: tuple[int, int] = (12, 10), mode: str = "RGB", kind="PNG") -> bytes:
    out = io.BytesIO()
    Image.new(mode, size, color).save(out, kind)
    return out.getvalue()


@pytest.fixture
def shard(tmp_path: Path) -> Callable[[str, dict[str, bytes]], Path]:
    """Writes a .tar of members."""

    def write(name: str, members: dict[str, bytes]) -> Path:
        path = tmp_path / name
        with tarfile.open(path, "w") as tar:
            for member, data in members.items():
                info = tarfile.TarInfo(member)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        return path

    return write
