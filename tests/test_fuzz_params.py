"""Ten thousand configurations that people might mistype, from Python, YAML, JSON, by dotted name and as flags: whatever
is wrong is one ParamError that names what was written, and what is right comes back from text as it was."""

import copy
import re
import shlex
from dataclasses import fields, is_dataclass
from enum import Enum
from types import NoneType
from typing import get_args, get_origin

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmfsdp.params import ParamError, RunParams, load
from mmfsdp.params.check import type_hints
from mmfsdp.params.cluster import read_cluster
from mmfsdp.params.flags import command_line, leaves, read_command_line, read_words

ODD = [
    None, True, False, 0, 1, -1, 2, 3.5, -0.0, 1e308, -1e308, 10**30, -(10**400), float("nan"), float("inf"), "", " ",
    "1", "0.5", "1e999", "nan", "none", "every:3", "every:٣", "every:²", "every:", "every:1e3", "null", "été", "日本",
    "a\nb", "\0", "\ud800", "x" * 5000, "{}", "[]", "a.b.c", "*", "[", "!", "!!", "(?", "../x", "~", "~nobody/x", "/",
    "%j", "FSDP2", "fsdp2", "Ⅷ", "²", "bf16", "slurm", "webdataset", "shards/{000..", "{3..1}", [], {}, [[]], [{}],
    [None], [1, "a"], {"a": 1}, {"": {}}, {1: 2}, {None: None}, ["a", ["b"]], [{"modality": "audio"}],
    [{"source": "json"}], (1, 2), [{"config": {"a": [1, {"b": None}]}}], b"bytes", object(), {1, 2}, 1j,
    {"config": float("nan")}, {"source": "json"}, {"name": "x", "weights": []}, range(3), int, slice(1),
]  # fmt: skip
HARDLY = ["", "\t", ":", "- ", "&a", "*a", "{", "[", "!!python/x", "\x00", "é", "\n", "<<: *a", "? ", "1_0", "0x1f",
          "--- ", "'", '"', "2026-01-01", "!!binary x", "%YAML 9", "@", "`", "|", ">", "#", "\ufeff", ".inf", ",", "}",
          "9" * 5000, "1:2:3", "~", "=", "-", "\\"]  # fmt: skip
ANY = st.characters()  # surrogates, too
WORD = st.text(ANY, max_size=12)
SCALAR = st.none() | st.booleans() | st.integers() | st.floats() | WORD
TREE = st.recursive(SCALAR, lambda s: st.lists(s, max_size=3) | st.dictionaries(WORD | st.integers(), s, max_size=3))
DEFAULT = RunParams()
TINY = load("tiny")
FULL = DEFAULT.change(
    **{
        "model.kind": "multimodal",
        "model.encoders": [{"config": {"a": 1}}],
        "data.more": [{"source": "json", "path": "a"}],
    }
)
NAMES = [name for name, _ in leaves(DEFAULT.to_dict())]


def cases(number):
    """The same cases at each run in one environment."""
    few = settings(max_examples=number, derandomize=True, database=None, deadline=None)
    return settings(few, suppress_health_check=list(HealthCheck))


def likely(hint):
    """Values of a declared type, most of them sound."""
    if is_dataclass(hint):
        return [{}, {f.name: likely(type_hints(hint)[f.name])[-1] for f in fields(hint)}, {"name": "a"}, {"x": 1}]
    if get_origin(hint) is tuple:
        return [[], *([one] for one in likely(get_args(hint)[0]))]
    if get_args(hint) and get_origin(hint) is not dict:
        return [value for one in get_args(hint) for value in likely(one)]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return [*hint, *(member.value for member in hint)]
    words = ["a", "every:2", "64G", "runs", "a.*", "cuda/12.4", "node[1-3]", "gpt2"]
    return {int: [0, 1, 2, 4], float: [0.0, 0.1, 1.5], bool: [False, True], str: words, NoneType: [None]}.get(
        hint, [{}, {"a": 1}, {"a": {"b": None}}]
    )


def pairs(cls, *path):
    """(where, value) for every field of every section: each likely value many times, and all strange ones."""
    for f in fields(cls):
        hint = type_hints(cls)[f.name]
        if is_dataclass(hint):
            yield from pairs(hint, *path, f.name)
        yield from (((*path, f.name), value) for value in [*likely(hint) * 12, *ODD])


PAIRS = list(pairs(RunParams)) + [((key,), odd) for key in ("", 1, None, "trian", "x" * 300) for odd in ODD]
PAIRS += [((part, key), 1) for part in ("train", "data") for key in ("", 1, None, "stepps", "é", "a.b", "x" * 300)] * 5


def nested(changes):
    values = {}
    for (*path, last), value in changes:
        place = values
        for key in path:
            if not isinstance(place.get(key), dict):
                place[key] = {}
            place = place[key]
        place[last] = copy.deepcopy(value)
    return values


def must(call, said, known=()):
    """What `call` gives, or None after a ParamError of one line that names a field of `known`, or of RunParams."""
    try:
        return call()
    except ParamError as error:
        assert "\n" not in str(error) and len(str(error)) < 1500, (said, str(error)[:3000])
        field = error.field
        if re.sub(r"\.\d+", "", field) not in DOTTED:
            known = {ParamError(name, "").field for name in known}
            assert field in known or any(name.startswith(f"{field}.") for name in known), (field, said)
        return None
    except Exception as error:
        raise AssertionError(f"{type(error).__name__} of {said!r:.3000}") from error


def paths(values, prefix=""):
    """The dotted name of everything in nested mappings and lists, as written."""
    if isinstance(values, (list, tuple)):
        values = dict(enumerate(values))
    if isinstance(values, dict):
        for key, value in values.items():
            name = prefix + ParamError(str(key), "").field
            yield name
            yield from paths(value, f"{name}.")


DOTTED = {re.sub(r"\.\d+", "", name) for name in paths(FULL.to_dict())} | {"RunParams", "command line"}


def comes_back(changes, way):
    """Refused by name, or the same after the way through a text."""
    values = nested(changes)
    params = must(lambda: RunParams.from_dict(values), values, paths(values))
    if params is not None:
        assert must(lambda: way(params), params) == params


@given(st.lists(st.sampled_from(PAIRS), min_size=1, max_size=4))
@cases(7000)
def test_values_from_python(changes):
    comes_back(changes, lambda params: RunParams.from_json(params.to_json()))


@given(TREE)
@cases(200)
def test_anything_from_python(values):
    must(lambda: RunParams.from_dict(values), values, paths(values))


@given(st.lists(st.sampled_from(PAIRS), min_size=1, max_size=4))
@cases(300)
def test_values_through_yaml(changes):
    comes_back(changes, lambda params: RunParams.from_yaml_text(params.to_yaml()))


BITS = st.lists(st.tuples(st.integers(0, 400), st.sampled_from(HARDLY) | WORD, st.integers(0, 40)), max_size=4)
TEXT = """train: {steps: 60, lr: 1e-3, max_grad_norm: null}
fsdp:
  backend: FSDP2
  frozen_policy: AUTO
  memory_budget_gib: 1.5
model:
  freeze: [vision_encoder.*, '!language_model.x.*']
  vision: &v {source: open_clip, name: ViT-B-32, config: {embed_dim: 32, act: [a, 1, null]}}
data:
  more:
  - {source: json, path: "a b.jsonl", weight: 0.2}
"""
JSON = RunParams.from_yaml_text(TEXT).to_json()


def broken(text, bits):
    for at, word, gone in bits:
        at %= len(text) or 1
        text = text[:at] + word + text[at + gone :]
    return text


@given(BITS, st.sampled_from([None, 100, -1]), st.booleans())
@cases(1200)
def test_texts_that_are_hardly_yaml_or_json(tmp_path_factory, bits, end, cluster):
    text = broken(TEXT, bits)
    file = tmp_path_factory.getbasetemp() / "hardly.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass")[:end])
    for read in (
        lambda: RunParams.from_yaml(file),
        lambda: RunParams.from_json(broken(JSON, bits)),
        lambda: read_cluster(str(file)),
    ):
        try:
            read()
        except ParamError as error:
            assert error.field and "\n" not in str(error) and len(str(error)) < 1500, text
        except Exception as error:
            raise AssertionError(f"{type(error).__name__} of {text!r}") from error


@given(st.sampled_from(NAMES), st.just("") | WORD, st.sampled_from(ODD) | TREE)
@cases(600)
def test_dotted_names(name, more, value):
    name += more
    must(lambda: DEFAULT.change(**{name: value}), (name, value), [name, *paths(value, f"{name}.")])


WORDS = [str(odd) for odd in ODD if not isinstance(odd, (dict, set))]
FLAGS = [f"--{name}".replace("_", "-") for name, _ in leaves(TINY.to_dict())] + ["--config", "--profile", "--", "-h"]
FLAGS += [flag + more for flag in FLAGS for more in ("x", "é", "=", "=1", "=None")]
FLAGS += [".no-".join(flag.rsplit(".", 1)) for flag in FLAGS]
LINE = st.lists(
    st.tuples(st.sampled_from(FLAGS), st.sampled_from(WORDS))
    | st.tuples(st.sampled_from(FLAGS))
    | st.tuples(st.sampled_from(FLAGS), WORD, WORD),
    min_size=1,
    max_size=3,
).map(lambda flags: sum(flags, ()))


@given(LINE)
@cases(900)
def test_flags(words):
    names = [word.lstrip("-").partition("=")[0].replace("-", "_") for word in words] + list(paths(TINY.to_dict()))
    more = [f"{name}.{i}{key}" for name in names for i in range(4) for key in ("", ".source", ".path")]
    must(lambda: read_words(words, default=TINY), words, names + more)


@given(LINE)
@cases(200)
def test_command_lines(words):
    line = shlex.join(["mmfsdp", "run", "--config", "tiny", *words])
    try:
        found = read_command_line(line)
    except ParamError:
        return
    if "# no flags" not in command_line(*found):
        assert read_command_line(command_line(*found)) == found, line
