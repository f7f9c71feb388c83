"""A checkpoint of which a file is damaged in any way: an error that names the file and the way on, or nothing lost."""

import shutil

import pytest
import torch
from hypothesis import given
from torch import nn

from mmfsdp import checkpoint
from mmfsdp.params import ParamError, StateDictType
from tests.ruin import always, ruin, ruins


def trained(width=2):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, width))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[1].parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module", params=StateDictType)
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    model, optimizer = trained()
    for step in (1, 2):
        checkpoint.save(folder, model=model, step=step, optimizer=optimizer, kind=request.param)
    return folder


@always(60)
@given(ruins(range(12)))
def test_a_damaged_checkpoint_is_refused_or_whole(saved, wrong):
    place, *how = wrong
    newest = saved / "step_00000002"
    files = sorted(newest.rglob("*.safetensors"))
    path = files[place % len(files)]
    shutil.copytree(newest, saved / "kept")
    ruin(path, *how)
    try:
        model, optimizer = trained()
        nn.init.zeros_(model[1].weight)
        found = checkpoint.latest(saved)
        try:
            checkpoint.resume(model, optimizer, found)
        except ParamError as error:
            words = str(error)
            assert str(path) in words and "--step 1" in words and "\n" not in words
            with pytest.raises(ParamError):
                checkpoint.load(model, found)
        else:
            assert torch.equal(model[1].weight, trained()[0][1].weight)
            checkpoint.load(model, found)
    finally:
        shutil.rmtree(newest)
        (saved / "kept").rename(newest)


def test_another_shape_than_was_saved_is_refused(saved):
    with pytest.raises(ParamError, match=r"checkpoint: .*1\.(weight|bias)"):
        checkpoint.load(trained(width=3)[0], saved / "step_00000002")
