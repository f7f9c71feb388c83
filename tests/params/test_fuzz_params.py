"""Values that people might mistype: what is wrong is one ParamError of one line, and what is right comes back from text
as it was."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmfsdp.params import ParamError, RunParams, load
from mmfsdp.params.base import leaves, read_yaml

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
