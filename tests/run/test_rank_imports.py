"""What a rank does not import: optional packages that its run does not use."""

import gc

import pytest

from mmfsdp.kit.run.ranks.rank_imports import unused_packages, without_collections
from mmfsdp.params import RunParams, load
from tests.processes import in_fresh_python


def of_vision(name: str, **config) -> RunParams:
    return RunParams().change(**{"model.vision.name": name, "model.vision.config": config})


@pytest.mark.parametrize(
    ("params", "packages"),
    [
        (load("tiny"), {"wandb", "accelerate", "timm"}),
        (of_vision("ViT-B-32"), {"wandb", "accelerate", "timm"}),
        (of_vision("ViT-B/32"), {"wandb", "accelerate", "timm"}),
        (of_vision("ViT-B-16-SigLIP"), {"wandb", "accelerate"}),  # timm's, by open_clip's own configuration
        (of_vision("", embed_dim=8, vision_cfg={"timm_model_name": "vit_tiny_patch16_224"}), {"wandb", "accelerate"}),
        (of_vision("hf-hub:somebody/model"), {"wandb", "accelerate"}),  # nobody knows
        (load("tiny_llava"), {"wandb"}),  # LoRA: peft imports accelerate
        (load("tiny").change(**{"model.kind": "multimodal", "model.lora_rank": 2}), {"wandb", "timm"}),
        (load("tiny").change(**{"train.callbacks": ["my_module:Callback"]}), set()),
    ],
)
def test_a_rank_leaves_out_the_packages_that_its_run_does_not_use(params, packages):
    assert set(unused_packages(params)) - {"triton"} == packages
    on_cpu = set(unused_packages(params.change(**{"train.device": "cpu"})))
    assert on_cpu == packages | ({"triton"} if packages else set())
    compiled = params.change(**{"train.device": "cpu", "fsdp.compile_units": True})
    assert set(unused_packages(compiled)) == packages, "torch's compiler looks for triton"


def test_a_package_that_is_left_out_is_not_installed_for_this_process_alone():
    code = """
import gc, sys
from importlib.util import find_spec
from mmfsdp.params import load
from mmfsdp.kit.run.ranks.rank_imports import rank_imports
with rank_imports(load("tiny")):
    import open_clip
    from open_clip.timm_model import timm
print(timm, find_spec("timm"), gc.isenabled(), gc.get_freeze_count() > 100_000)
"""
    assert in_fresh_python(code).split() == ["None", "None", "True", "True"]


def test_data_workers_import_no_fsdp_and_the_process_group_of_an_own_loop_no_models():
    code = """
import sys
import mmfsdp.kit.data.own_processor
print([name for name in ("torch.distributed.fsdp", "torch.distributed.tensor", "sympy") if name in sys.modules])
import mmfsdp.kit.train.process_group
print([name for name in ("transformers", "torch.distributed.fsdp", "mmfsdp.kit.models") if name in sys.modules])
"""
    assert in_fresh_python(code).split("\n") == ["[]", "[]", ""]


def test_collections_go_on_after_imports_that_fail_and_stay_off_where_a_person_has_switched_them_off():
    with pytest.raises(ImportError), without_collections():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    try:
        with without_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
