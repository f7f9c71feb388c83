"""Weights of the hub for nodes without internet: fetched once, and a job that would miss them is not submitted."""

import json
import os

from mmfsdp.kit.run.hub_cache import hub_weights, is_offline
from mmfsdp.kit.run.slurm.slurm import sbatch_text
from mmfsdp.params import RunParams, load
from tests.processes import in_fresh_python

SLURM = {"launch.executor": "slurm", "train.device": "cpu"}


def test_weights_are_fetched_and_a_job_without_them_is_refused(tmp_path):
    code = f"from tests.pretend_hub import fetch; fetch({str(tmp_path)!r})"
    status, said = json.loads(in_fresh_python(code).splitlines()[-1])
    before, with_network, after, without_a_part = said
    assert status == 0 and with_network == after == ""
    words = "model.language.weights: 'org/lm' is not in the hub's cache here"
    assert before.startswith(words) and "run `mmfsdp fetch`" in before and "launch.hub_offline to false" in before
    assert without_a_part.startswith(words)


def test_the_names_on_the_hub_are_those_that_ranks_load(tmp_path):
    assert hub_weights(load("tiny")) == {} == hub_weights(RunParams()), "generated, and random"
    assert hub_weights(load("qwen2_5_vl_7b")) == {"model.name": "Qwen/Qwen2.5-VL-7B-Instruct"}
    llava = {"language": "lmsys/vicuna-7b-v1.5", "vision": "openai/clip-vit-large-patch14-336"}
    assert hub_weights(load("llava_7b")) == {f"model.{part}.weights": name for part, name in llava.items()}
    towers = hub_weights(load("openflamingo_3b"))
    assert towers == {"model.vision.weights": "timm/vit_large_patch14_clip_224.openai"}, "of open_clip's tag"
    (tmp_path / "lm").mkdir()
    assert hub_weights(load("qwen2_5_vl_7b").change(**{"model.weights": str(tmp_path / "lm")})) == {}


def test_a_job_does_not_ask_the_hub_unless_somebody_says_so_or_has_own_code():
    job = load("tiny").change(**SLURM)
    assert "export HF_HUB_OFFLINE=1\n" in sbatch_text(job)
    for changes in ({"launch.hub_offline": False}, {"train.callbacks": ["my_module:say"]}):
        assert "HF_HUB_OFFLINE" not in sbatch_text(job.change(**changes))
    step = load("tiny").change(**{"launch.executor": "srun"})
    assert is_offline(step) and not is_offline(step.change(**{"launch.hub_offline": False}))
    assert not is_offline(load("tiny")), "here"


def test_a_command_says_that_it_asks_the_hub_and_does_not_wait_for_one_that_does_not_answer(tmp_path):
    code = """
from huggingface_hub import hf_hub_download
from mmfsdp.kit.run.hub_cache import tell_of_hub
for _ in range(2):
    tell_of_hub(print)
for file in ("config.json", "tokenizer.json"):
    try:
        hf_hub_download("ann/model", file)
    except OSError as error:
        print(type(error).__name__)
"""
    nobody = "http://127.0.0.1:9"  # the port of discard, which no machine serves
    here = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    said = in_fresh_python(code, env=here | {"HF_HOME": str(tmp_path), "HF_ENDPOINT": nobody}).splitlines()
    assert said[0] == f"asking {nobody}" and said[1].startswith("it does not answer (") and "refused" in said[1]
    assert said[2:] == ["LocalEntryNotFoundError"] * 2, "said once, and no file is tried again and again"
