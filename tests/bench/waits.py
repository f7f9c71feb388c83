"""`python -m tests.bench.waits`: what a forward of transformers' models reads from a GPU, family by family.

Counted on tensors that pretend to be on a GPU (tests/pretend_cuda.py), in tiny models with two layers of each kind, on
a batch without padding and with what our processor hands over. Writes notebooks/measured/waits.json.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers

from mmfsdp.kit.data.chat import AsIs
from mmfsdp.kit.models.values_on_host import GivenValues, unwrap
from tests import families
from tests.pretend_cuda import PretendCuda, Waits, pretend

STORED = Path(__file__).resolve().parent.parent.parent / "notebooks" / "measured" / "waits.json"
PLACE = re.compile(r"\((?:.*/)?(\w+)\.py:\d+ ")
WITHOUT_DECODER = ("blip", "blip-2", "florence2", "git", "idefics", "instructblip", "kosmos-2", "kosmos-2.5")
NOT_TRAINED = (*WITHOUT_DECODER, "pix2struct", "udop", "vision-encoder-decoder", "video_llava")
"""Architectures that `kind: transformers` does not train: encoder-decoders, and those without a chat template."""


def inputs_of(name: str, model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], frozenset[str]]:
    """Return the family's batch as our processor hands it over, and the names of what stays on the CPU."""
    inputs = families.Inputs(name).inputs()
    del inputs["attention_mask"]
    given = GivenValues(model)
    values = given({key: value for key, value in inputs.items() if key != "labels"})
    return inputs | values, given.on_host


def forward(name: str) -> tuple[Counter[str], Any, Any]:
    """Return what waits in a forward, and its outputs on the pretended GPU and on the CPU."""
    model = families.build(name).eval()
    model.register_forward_pre_hook(unwrap, with_kwargs=True)
    inputs, on_host = inputs_of(name, model)
    device = {}
    # Transformers asks for the GPU's kind, torch for cuDNN: neither is there.
    capability = mock.patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    with capability, torch.backends.cudnn.flags(enabled=False), Waits() as waits:
        on_gpu = pretend(model)
        for key, value in inputs.items():
            device[key] = AsIs(value) if key in on_host else PretendCuda(value)
        waits.found.clear()
        output = on_gpu(**device, use_cache=False)
        found = Counter(waits.found)
    return found, output, model(**inputs, use_cache=False)


def by_file(found: Counter[str]) -> dict[str, int]:
    """Return the number of waits by the file of transformers that they are in."""
    files: Counter[str] = Counter()
    for words, count in found.items():
        match = PLACE.search(words)
        assert match, words
        files[match[1]] += count
    return dict(sorted(files.items()))


def trained_families() -> list[str]:
    """Return the model types that `kind: transformers` trains, of those in tests/files/families.yaml."""
    return [name for name in families.FAMILIES if name not in NOT_TRAINED]


def table(result: dict[str, Any]) -> str:
    """Return the stored counts as Markdown."""
    lines = ["| model type | waits | in |\n", "|---|---|---|\n"]
    for name, files in result["families"].items():
        places = ", ".join(f"`{file}` {count}" for file, count in files.items())
        lines.append(f"| `{name}` | {sum(files.values())} | {places} |\n")
    return "".join(lines) + f"\nCounted with transformers {result['transformers']}.\n"


def main() -> None:
    """Count, and store the result."""
    counts = {name: by_file(forward(name)[0]) for name in trained_families()}
    STORED.write_text(json.dumps({"transformers": transformers.__version__, "families": counts}, indent=1) + "\n")
    print(table(json.loads(STORED.read_text())))


if __name__ == "__main__":
    main()
