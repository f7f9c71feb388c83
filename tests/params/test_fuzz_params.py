"""Values that people might mistype: what is wrong is one ParamError of one line, and what is right comes back from text
as it was."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmfsdp.params import ParamError, RunParams, load
from mmfsdp.params.base import MAX_YAML_BYTES, leaves, read_yaml

ODD = [
    None, True, 0, 1, -1, 2, 3.5, 1e308, -(10**400), float("nan"), float("inf"), "", " ", "0.5", "1e999", "every:²",
    "null", "été", "a\nb", "\0", "\ud800", "x" * 5000, "[", "!", "(?", "../x", "~", "%j", "FSDP2", "fsdp2", "bf16",
    "slurm", "webdataset", "multimodal", [], {}, [[]], [{}], [None], {"a": 1}, {"": {}}, {1: 2}, ["a", ["b"]],
    [{"modality": "audio"}], [{"source": "json"}], (1, 2), {"a": [1, {"b": None}]}, b"bytes", object(), {1, 2}, int,
]  # fmt: skip
NAMES = list(leaves(RunParams().to_dict())) + ["trian", "train.stepz", "train", "data.more.0", "model.vision.config.x"]
CASES = settings(
    max_examples=150, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)


@given(st.dictionaries(st.sampled_from(NAMES), st.sampled_from(ODD), min_size=1, max_size=3))
@CASES
def test_values_by_name_are_refused_or_come_back_from_text(changes):
    try:
        params = load("tiny").change(**changes)
    except ParamError as error:
        assert error.field and "\n" not in str(error) and len(error.message) < 1300
        return
    assert RunParams.from_dict(read_yaml(params.to_yaml(), name="YAML")) == params


def test_a_yaml_text_that_stands_for_more_than_it_seems_to_is_refused():
    """Each alias is a whole list or text again; a short file must not fill the memory of whoever reads it."""
    lists = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    for number in range(1, 12):
        lists += f"a{number}: &a{number} [{', '.join(10 * [f'*a{number - 1}'])}]\n"
    text = "a: &a " + 100_000 * "x" + "\nb: [" + ", ".join(2000 * ["*a"]) + "]\n"
    keys = "".join(f"key{number}: 1\n" for number in range(60_000))
    too_long = "a: " + MAX_YAML_BYTES * "x"
    for bomb in (lists, text, "a: &a [*a]", "a: 0x" + 3000 * "f", too_long):
        with pytest.raises(ParamError):
            read_yaml(bomb, name="YAML")
    assert len(read_yaml(keys, name="YAML")) == 60_000
    assert read_yaml("a: &a [1]\nb: *a", name="YAML") == {"a": [1], "b": [1]}, "an alias is no mistake"
