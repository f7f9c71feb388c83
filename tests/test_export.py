"""Exports hold what was trained and what was not, and load where they are meant to."""

import pytest
import torch

from mmfsdp import ParamError
from mmfsdp.evaluate import load_run
from mmfsdp.export import export, load_exported
from mmfsdp.models.interop import load_open_flamingo
from tests.test_train import go  # noqa: F401  # a fixture


def test_a_run_is_exported_whole_and_for_openflamingo(go, tmp_path):  # noqa: F811
    run = go(**{"train.steps": 2})
    _, trained, _ = load_run(run)
    export(run, tmp_path / "whole")
    again = load_exported(tmp_path / "whole")
    assert {n: p.shape for n, p in again.named_parameters()} == {n: p.shape for n, p in trained.named_parameters()}
    assert all(torch.equal(p, trained.get_parameter(n)) for n, p in again.named_parameters())

    file = export(run, tmp_path / "theirs", layout="open_flamingo")
    _, other, _ = load_run(run)
    for p in other.parameters():
        p.data.zero_() if p.requires_grad else None
    load_open_flamingo(other, file)
    assert all(torch.equal(p, trained.get_parameter(n)) for n, p in other.named_parameters())

    with pytest.raises(ParamError, match="layout: 'onnx' is not one of safetensors, open_flamingo"):
        export(run, tmp_path / "wrong", layout="onnx")
    with pytest.raises(FileExistsError):
        export(run, tmp_path / "whole")
