"""Hub names with HF_HUB_OFFLINE=1: what was downloaded is used, all else refused by name."""

import json
import os

from tests.processes import in_fresh_python

WORDS = """
from mmfsdp.kit.models import build_language, build_vision
from mmfsdp.params import BackboneParams
print(build_language(BackboneParams(name="ann/kept"), meta=True).config.n_embd)
for make in (
    lambda: build_language(BackboneParams(name="ann/new"), meta=True),
    lambda: build_vision(BackboneParams(source="open_clip", name="ViT-B-32", weights="laion2b_e16")),
    lambda: build_vision(BackboneParams(source="open_clip", name="ViT-B-32", weights="openly")),
):
    try:
        make()
    except ValueError as error:
        print(error)
"""


def test_offline_a_downloaded_model_is_planned_and_another_is_refused(tmp_path):
    kept = tmp_path / "hub/models--ann--kept"
    for folder in ("refs", "snapshots/1"):
        (kept / folder).mkdir(parents=True)
    (kept / "refs/main").write_text("1")
    config = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 60000}
    (kept / "snapshots/1/config.json").write_text(json.dumps(config))
    here = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    width, refused, tag, unknown = in_fresh_python(WORDS, env=here).splitlines()
    assert width == "16"
    assert refused.startswith("language.name: 'ann/new' gives no Config (")
    assert tag.startswith("vision.weights: 'laion2b_e16' gives no ViT-B-32 (")
    assert unknown.startswith("vision.weights: 'openly' gives no ViT-B-32 (")
