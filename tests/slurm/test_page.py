"""The page on clusters says what is so: its profile is one, its batch file is the one, and no field is left out."""

import re
from pathlib import Path

import pytest

from mmfsdp.kit.cli import build_parser
from mmfsdp.kit.cli.flags import params_of, read_words
from mmfsdp.kit.run.slurm.site import in_container
from mmfsdp.kit.run.slurm.slurm import sbatch_text
from mmfsdp.params import Executor, RunParams
from mmfsdp.params.launching import SLURM_FIELDS
from mmfsdp.params.run import PRESETS, read_cluster

PAGE = (Path(__file__).resolve().parents[2] / "notebooks/reference/clusters.md").read_text()


@pytest.mark.parametrize("path", sorted((PRESETS / "clusters").glob("*.yaml")), ids=lambda path: path.stem)
def test_each_profile_makes_a_batch_file_and_says_where_it_is_from(path):
    changes = {"launch.executor": "slurm", "launch.cluster": path.stem, "launch.nodes": 2, "train.device": "cuda"}
    text = sbatch_text(RunParams().change(**changes))
    assert re.search("^#SBATCH --(gpus-per-node|gres)=", text, re.MULTILINE) and "--nodes=2" in text
    is_of_a_centre = path.stem.startswith(("jsc", "nersc", "alliance"))
    assert ("Not run by us; made on" in path.read_text()) is is_of_a_centre


def test_the_page_on_clusters_is_true(tmp_path, monkeypatch):
    profile, command, batch, _, boxed, step = re.findall(r"```\w*\n(.+?)```", PAGE, re.DOTALL)
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters/lab.yaml").write_text(profile)
    (tmp_path / "clusters/boxed.yaml").write_text(boxed)
    monkeypatch.chdir(tmp_path)
    assert in_container(read_cluster("boxed").launch)
    assert params_of(read_words(build_parser(), step.split()[1:])).launch.executor is Executor.SRUN
    text = sbatch_text(params_of(read_words(build_parser(), command.split()[1:])))
    assert text.startswith(batch + "\n# setup\n"), text
    assert "/shared/venv/bin/python" in text and "module load cuda/12.4" in text
    assert [field for field in SLURM_FIELDS if f"`{field}`" not in PAGE] == []
