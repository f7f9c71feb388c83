"""Thousands of configurations that people might mistype, from YAML, by dotted name and as flags: whatever is wrong is
one ParamError that names the field."""

import random
import shlex

from mmfsdp.params import ParamError, RunParams, load, preset_names
from mmfsdp.params.flags import command_line, leaves, read_command_line

ODD = [
    None, True, False, 0, 1, -1, 2, 3.5, -0.0, 1e308, -1e308, 10**30, -(10**400), float("nan"), float("inf"), "", " ",
    "1", "0.5", "1e999", "nan", "none", "every:3", "every:٣", "every:", "every:1e3", "null", "été", "日本", "a\nb",
    "\0",
    "\ud800", "x" * 5000, "{}", "[]", "a.b.c", "*", "[", "!", "!!", "(?", "../x", "~", "~nobody/x", "/", "%j", "FSDP2",
    "fsdp2", "Ⅷ", "²", "bf16", "slurm", "webdataset", "shards/{000..", "{3..1}", [], {}, [[]], [{}], [None], [1, "a"],
    {"a": 1}, {"": {}}, {1: 2}, {None: None}, ["a", ["b"]], [{"modality": "audio"}], [{"source": "json"}], (1, 2),
    [{"config": {"a": [1, {"b": None}]}}], b"bytes", object(), {1, 2}, {"config": float("nan")}, {"source": "json"},
    {"name": "x", "weights": []},
]  # fmt: skip
HARDLY = (
    "",
    "\t",
    ":",
    "- ",
    "&a",
    "*a",
    "{",
    "[",
    "!!python/x",
    "\x00",
    "é",
    "\n",
    "<<: *a",
    "? ",
    "1_0",
    "0x1f",
    "--- ",
)


def damaged(rng, base):
    """A configuration with up to three of its values, or of its keys, replaced."""
    values = base.to_dict()
    for _ in range(rng.randint(1, 3)):
        place = values
        while True:
            key = rng.choice(list(place))
            if isinstance(place[key], dict) and place[key] and rng.random() < 0.9:
                place = place[key]
                continue
            break
        kind = rng.random()
        if kind < 0.75:
            place[key] = rng.choice(ODD)
        elif kind < 0.9:
            place[mistyped(rng, str(key))] = place.pop(key)
        else:
            place[rng.choice([1, None, "", "été", 3.5, True, "x" * 300])] = rng.choice(ODD)
        if not place:
            break
    return values


def mistyped(rng, word):
    at = rng.randrange(len(word) + 1)
    return word[:at] + rng.choice(["", "x", "_", ".", "-", "é"]) + word[at + rng.randint(0, 1) :]


def must(call, said):
    """What `call` gives, or None after a ParamError that says something of use."""
    try:
        return call()
    except ParamError as error:
        text = str(error)
        assert error.field and "\n" not in text and len(text) < 1500, (said, text[:3000])
        return None
    except Exception as error:
        raise AssertionError(f"{type(error).__name__} of {said!r:.3000}") from error


def test_values_from_python_yaml_and_json():
    rng = random.Random(10)
    bases = [load(name) for name in preset_names()]
    good = 0
    for _ in range(1000):
        values = damaged(rng, rng.choice(bases))
        params = must(lambda values=values: RunParams.from_dict(values), values)
        if params is not None:
            good += 1
            assert must(lambda params=params: RunParams.from_yaml_text(params.to_yaml()), params) == params
            assert must(lambda params=params: RunParams.from_json(params.to_json()), params) == params
    assert good


def test_texts_that_are_hardly_yaml_or_json(tmp_path):
    rng = random.Random(11)
    text = load("tiny").to_yaml()
    for _ in range(150):
        wrong = list(text)
        for _ in range(rng.randint(1, 5)):
            at = rng.randrange(len(wrong))
            wrong[at : at + rng.randint(0, 40)] = rng.choice(HARDLY)
        file = tmp_path / "x.yaml"
        file.write_bytes("".join(wrong).encode()[: rng.choice([None, 100, -1])])
        must(lambda file=file: RunParams.from_yaml(file), "".join(wrong))
        must(lambda wrong=wrong: RunParams.from_json("".join(wrong)), "".join(wrong))


def test_dotted_names():
    rng = random.Random(12)
    base = load("tiny")
    names = [name for name, _ in leaves(base.to_dict())]
    for _ in range(40):
        name, value = rng.choice(names), rng.choice(ODD)
        if rng.random() < 0.3:
            name = mistyped(rng, name)
        must(lambda name=name, value=value: base.change(**{name: value}), (name, value))


def test_flags():
    rng = random.Random(13)
    base = load("tiny")
    names = [name for name, _ in leaves(base.to_dict())]
    words = [str(odd) for odd in ODD if not isinstance(odd, (dict, set)) and "\x00" not in str(odd)]
    for _ in range(800):
        name = rng.choice(names)
        if rng.random() < 0.3:
            name = mistyped(rng, name)
        argv = ["--config", "tiny", f"--{name.replace('_', '-')}", *rng.sample(words, rng.choice([0, 1, 1, 1, 2]))]
        line = shlex.join(["mmfsdp", "run", *argv])
        found = must(lambda line=line: read_command_line(line), line)
        if found and "# no flags" not in command_line(*found):
            assert read_command_line(command_line(*found)) == found, line
