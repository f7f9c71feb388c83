"""Environment variables in the paths of a run: expanded where it is launched, and nowhere else."""

import pytest

from mmfsdp.params import ParamError, RunParams
from mmfsdp.params.variables import with_variables


def test_variables_in_paths_are_expanded_and_nothing_else_is(monkeypatch):
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    monkeypatch.delenv("NO_SUCH", raising=False)
    given = {
        "launch.folder": "$SCRATCH/runs",
        "data.source": "json",
        "data.path": "${SCRATCH}/rows.jsonl",
        "data.more": [{"source": "json", "path": "$SCRATCH/more.jsonl"}],
        "model.language.weights": "$SCRATCH/lm",
        "launch.executor": "slurm",
        "launch.setup": ["source $SCRATCH/env.sh"],
    }
    params = with_variables(RunParams().change(**given))
    assert params.launch.folder == "/scratch/me/runs" and params.data.path == "/scratch/me/rows.jsonl"
    assert params.data.more[0].path == "/scratch/me/more.jsonl"
    assert params.model.language.weights == "/scratch/me/lm"
    assert params.launch.setup == ("source $SCRATCH/env.sh",), "the job expands it"
    assert with_variables(params) == params
    with pytest.raises(ParamError, match="data.more.0.path: '.NO_SUCH/x': the variable NO_SUCH is not set; set it, or"):
        with_variables(params.change(**{"data.more.0.path": "$NO_SUCH/x"}))
