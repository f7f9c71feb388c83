"""Hub names where the hub does not answer: what was downloaded is used, all else refused at once."""

import json
import os
import subprocess
import sys

WORDS = """
from mmfsdp.models import build_language, build_vision
from mmfsdp.models.interop import load_llava
from mmfsdp.params import BackboneParams
print(build_language(BackboneParams(name="ann/kept"), meta=True).config.n_embd)
for make in (
    lambda: build_language(BackboneParams(name="ann/new"), meta=True),
    lambda: load_llava("ann/llava"),
    lambda: build_vision(BackboneParams(source="open_clip", name="ViT-B-32", weights="openai")),
    lambda: build_vision(BackboneParams(source="open_clip", name="ViT-B-32", weights="openly")),
):
    try:
        make()
    except ValueError as error:
        print(error)
"""


def test_without_network_a_kept_model_is_planned_and_another_is_refused_without_a_second_try(tmp_path):
    kept = tmp_path / "hub/models--ann--kept"
    for folder in ("refs", "snapshots/1"):
        (kept / folder).mkdir(parents=True)
    (kept / "refs/main").write_text("1")
    config = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 60000}
    (kept / "snapshots/1/config.json").write_text(json.dumps(config))
    here = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    here |= {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}  # where nobody listens
    here.pop("HF_HUB_OFFLINE", None)
    done = subprocess.run([sys.executable, "-c", WORDS], capture_output=True, text=True, env=here)
    width, refused, llava, tag, unknown = done.stdout.splitlines()
    assert width == "16" and "Retrying" not in done.stderr
    reason = "(it was never downloaded here, and http://127.0.0.1:9 does not answer)"
    assert refused == f"language.name: 'ann/new' gives no Config {reason}; give a folder or a hub name"
    assert llava == f"load_llava: 'ann/llava' gives no Config {reason}; give a folder or a hub name"
    assert tag == f"vision.weights: 'openai' gives no ViT-B-32 {reason}; give a folder or a tag"
    assert "'openly' is no tag of open_clip's ViT-B-32, nor a file; choose openai, laion" in unknown
