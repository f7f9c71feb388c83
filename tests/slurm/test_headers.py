"""Lines of batch files as centres document them: each is an option of our own batch file, or refused with its field."""

import shlex

import pytest
import yaml

from mmfsdp import ParamError, RunParams
from mmfsdp.kit.run.slurm.slurm import sbatch_text
from mmfsdp.params.launching import SBATCH_FIELDS
from mmfsdp.params.sbatch_lines import options_of_line
from tests.slurm.cluster import FILES

HEADERS = yaml.safe_load((FILES / "headers.yaml").read_text(encoding="utf-8"))
AS_IT_IS, COMMENT, REFUSED = "as it is", "a comment", "refused"
SLURM = {"launch.executor": "slurm", "launch.ranks": 8, "launch.nodes": 2, "train.device": "cuda"}


def options_in(text: str) -> set[str]:
    """Return the options of a batch file, as bash reads them."""
    lines = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    return {" ".join(shlex.split(line)) for line in lines}


def test_there_are_twenty_headers():
    assert len(HEADERS) >= 20


@pytest.mark.parametrize("centre", HEADERS)
def test_each_line_of_a_header_is_an_option_or_is_refused_with_its_field(centre):
    for line, becomes in HEADERS[centre].items():
        try:
            text = sbatch_text(RunParams().change(**SLURM | {"launch.sbatch": [line]}))
        except ParamError as error:
            words = str(error)
            assert becomes != AS_IT_IS and error.field == "launch.sbatch", f"{line}: {error}"
            if becomes.startswith("break "):
                assert f"mmfsdp sets {becomes.removeprefix('break ')} itself, and the launch needs it so" in words, line
            elif becomes != REFUSED:
                assert f"from launch.{becomes}; remove it, set that" in words, f"{line}: {error}"
        else:
            assert becomes in (AS_IT_IS, COMMENT), f"{line} is taken"
            options = options_of_line(line)
            assert len(options) == (becomes == AS_IT_IS)
            assert {f"--{option}" for option in options} <= options_in(text), f"{line}: {text}"


def test_the_field_that_is_named_takes_the_value_of_the_line():
    for header in HEADERS.values():
        for line, field in header.items():
            if SBATCH_FIELDS.get(field, None) == "" and field not in ("gres", "nodes") or field == "slurm_cluster":
                (option,) = options_of_line(line)
                changes = SLURM | {f"launch.{field}": option.partition("=")[2]}
                assert f"--{option}" in options_in(sbatch_text(RunParams().change(**changes))), line
