"""`mmfsdp new my.yaml --pictures PATH`: look at data, show samples, and write a configuration that trains on them."""

from __future__ import annotations

import math
import shlex
import textwrap
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ...params import BackboneSource, ModelKind, ParamError, RunParams, load
from ...params.base import plain, without_controls
from ...params.findings import Finding
from ...params.in_words import WIDTH
from ..run.hub_cache import tell_of_hub
from .json_output import reply
from .planning import say

if TYPE_CHECKING:
    from ..data.batch import Sample
    from ..data.processor import SampleProcessor
    from ..data.sources.detect import Detected
    from ..train.notices import Look
    from .answers import NewAnswer

SHOWN = 3
TEXT_LINES = 3
"""Lines of a text that are shown."""
COUNTED = 100
"""Samples whose tokens are counted."""
ROUND_TO = 8
FALLBACK_LENGTH = 256
"""max_length where no tokenizer of the model is here."""
SMALL = "tiny"
"""The preset whose backbones are taken where no model is named."""
JOINED_WORDS = "flamingo joins the two by gated cross-attention instead; model.lora_rank adds LoRA"
SMALL_WORDS = (
    "the demo's backbones: they know the words of the demo's captions alone, so this shows that everything runs. To "
    "learn from your texts name a model of yours: --vision DIR --language DIR, or --model NAME"
)


def new(values: Namespace) -> int:
    """Write a configuration for data of one's own. Returns 0."""
    target = Path(values.file)
    if target.exists():
        raise ParamError("file", f"{values.file!r} exists already; give another name, or remove it first")
    if not target.absolute().parent.is_dir():
        raise ParamError("file", f"{values.file!r} is in a folder that does not exist; make {target.parent} first")
    base, comments = base_params(values)
    say("looking at the data")
    tell_of_hub(say)
    from ..data.sources.detect import detect

    found = detect(values.pictures)
    if not values.json:
        for line in describe(found):
            print(line)
    say("looking at the model")
    params, of_data, notices = with_data(base, found)
    if not values.json:
        for notice in notices:
            print(*_wrapped(f"{notice.level}:", notice.message), sep="\n")
    text = as_yaml(params, comments | of_data, command_of(values))
    with target.open("x", encoding="utf-8") as file:  # fails where it was made meanwhile
        file.write(text)
    if RunParams.from_yaml(target) != params:
        raise AssertionError(f"{target} reads as other parameters")
    following = [f"mmfsdp {command} {shlex.quote(values.file)}" for command in ("plan", "run")]
    if values.json:
        return reply(values, _answer(values.file, params, found, notices, following))
    print(f"\nwritten to {values.file}; next:", *following, sep="\n  ")
    return 0


def _answer(file: str, params: RunParams, found: Detected, notices: list[Finding], following: list[str]) -> NewAnswer:
    """Return what was found and written, for programs."""
    from .answers import NewAnswer, SampleFigures

    train, heldout = found.splits["train"], found.splits["heldout"]
    samples = []
    for sample in found.samples(SHOWN):
        sizes = [image.size for image in sample.images]
        samples.append(SampleFigures(label=sample.label, pictures=sizes, text=sample.text))
    return NewAnswer(
        ok=True,
        file=file,
        params=params.to_dict(),
        source=str(found.params.source),
        formats=found.formats(),
        shape=found.shape(),
        train_records=train.length,
        heldout_records=heldout.length,
        samples=samples,
        notices=notices,
        next=following,
    )


def command_of(values: Namespace) -> str:
    """Return the command that writes this file again, quoted as a shell needs it."""
    words = ["mmfsdp", "new", values.file, "--pictures", values.pictures]
    for option in ("vision", "language", "model"):
        if getattr(values, option):
            words += [f"--{option}", getattr(values, option)]
    return shlex.join(words)


def base_params(values: Namespace) -> tuple[RunParams, dict[str, str]]:
    """Return the parameters of the model that the words name, without data, and comments on them by dotted names.

    Raises ParamError.
    """
    backbones = [name for name in ("vision", "language") if getattr(values, name)]
    if values.model and backbones:
        raise ParamError(backbones[0], "names a part of a model, and --model a complete one; give only one of them")
    if len(backbones) == 1:
        missing = "language" if backbones == ["vision"] else "vision"
        raise ParamError(missing, f"is missing: --{backbones[0]} needs --{missing}, too; or give --model NAME")
    params = RunParams()
    if values.model:
        model = _place(values.model)
        return params.change(**{"model.kind": ModelKind.TRANSFORMERS, "model.name": model}), {}
    if backbones:
        vision, language = _place(values.vision), _place(values.language)
        changes: dict[str, Any] = {"model.kind": ModelKind.MULTIMODAL}
        changes["model.vision"] = {"source": BackboneSource.TRANSFORMERS, "name": vision, "weights": vision}
        changes["model.language"] = {"name": language, "weights": language}
        return params.change(**changes), {"model.kind": JOINED_WORDS}
    small = load(SMALL)
    changes = {"model": small.model, "train.lr": small.train.lr, "launch.threads": small.launch.threads}
    return params.change(**changes), {"model": SMALL_WORDS}


def _place(name: str) -> str:
    """Return a model's folder as an absolute path, or its name on the hub. Raises ParamError for a missing folder."""
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path.absolute())
    # No name of the hub looks like this, so it is a folder that is not there.
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ParamError("model", f"{name!r} is not a folder; give the folder of a model, or its name on the hub")
    return name


def describe(found: Detected) -> Iterator[str]:
    """Yield lines of at most 80 columns on the data and three of its samples."""
    params, train, heldout = found.params, found.splits["train"], found.splits["heldout"]
    formats = found.formats()
    more = f", and {len(formats) - SHOWN} more" if len(formats) > SHOWN else ""
    yield from _wrapped("found:", f"source {params.source}: {', '.join(formats[:SHOWN])}{more}")
    yield from _wrapped("rows:", found.shape())
    if params.pictures:
        yield from _wrapped("pictures:", f"in {params.pictures}")
    lengths = [source.length for source in (train, heldout)]
    if None not in lengths:
        yield from _wrapped("records:", f"{lengths[0]} train, {lengths[1]} are held out")
    for sample in found.samples(SHOWN):
        yield ""
        yield from _sample_lines(sample)


def _sample_lines(sample: Sample) -> Iterator[str]:
    sizes = ", ".join(f"{width} x {height}" for width, height in (image.size for image in sample.images))
    yield from _wrapped("sample:", f"{sample.label}; pictures: {sizes or 'none'}")
    for message in sample.messages:
        yield from _wrapped(f"  {message.role}:", message.text, lines=TEXT_LINES)
        if message.answers:
            yield from _wrapped("   or:", "; ".join(message.answers), lines=TEXT_LINES)


def _wrapped(title: str, text: str, *, lines: int | None = None) -> list[str]:
    """Return lines of 80 columns, without what a terminal would obey: the text comes from somebody's file."""
    from ..data.corrupt import printable

    clean = printable(without_controls(" ".join(text.split())))
    indent = " " * 12
    return textwrap.wrap(
        f"{title:<11} {clean}",
        WIDTH,
        subsequent_indent=indent,
        max_lines=lines,
        placeholder=" ...",
        drop_whitespace=True,
    )


def with_data(base: RunParams, found: Detected) -> tuple[RunParams, dict[str, str], list[Finding]]:
    """Return the parameters with the data, for dotted names a comment that says what to change, and the notices.

    Raises ParamError for a model that cannot be built, or that takes none of the samples.
    """
    from ..run.rank_count import with_ranks
    from ..train.notices import look_at, notices
    from ..train.prepare import kept_model

    data, train = found.params, found.splits["train"]
    params = base.change(**{f"data.{name}": getattr(data, name) for name in ("source", "path", "pictures")})
    model, processor = kept_model(params)
    look = look_at(train, processor, COUNTED)
    length, length_words = fitting_length(model, processor, look)
    ranks = with_ranks(params).launch.world_size
    # One step of all ranks must not need more records than there are.
    batch_size = max(1, min(params.train.batch_size, (train.length or 10**6) // ranks))
    steps, steps_words = params.train.steps, "the number of records is not known before all shards are read"
    if train.length is not None:
        steps = max(1, math.ceil(train.length / (batch_size * ranks)))
        steps_words = f"about one epoch: {train.length} records in batches of {batch_size} on each of {ranks} ranks"
    params = params.change(
        **{
            "data.max_length": length,
            "train.steps": steps,
            "train.batch_size": batch_size,
            "train.warmup_steps": min(params.train.warmup_steps, steps // 10),
            "train.eval_every": max(1, steps // 4),
        }
    )
    comments = {
        "data.path": "set heldout to other files, or to a published split, to measure the loss on them",
        "data.max_length": length_words,
        "train.steps": f"{steps_words}; more steps are more epochs",
        "train.batch_size": "samples of a rank; raise it while `mmfsdp plan` shows that the memory is enough",
        "train.lr": "try other values of it first: mmfsdp sweep --grid train.lr=1e-4,1e-3",
        "train.eval_every": "steps between two measurements of the loss on held-out samples",
    }
    return params, comments, notices(params, {"data": found.splits}, processor, looks={"data": look})


def fitting_length(model: Any, processor: SampleProcessor | None, look: Look) -> tuple[int, str]:
    """Return the max_length that holds all samples of a look, as far as the model reads, and words on where it is from.

    Raises ParamError for a model that takes none of the samples.
    """
    if processor is None:
        words = (
            "a guess, since no tokenizer of this model is in a folder here; see how many samples a run reports as cut"
        )
        return FALLBACK_LENGTH, words
    lengths = look.lengths
    if not lengths:
        from ..data.corrupt import first_reasons

        reasons = first_reasons(look.refused)
        raise ParamError("pictures", f"the model accepts none of the first {look.records} samples: {reasons}")
    longest = max(lengths)
    length = math.ceil(longest / ROUND_TO) * ROUND_TO
    words = f"the longest of {len(lengths)} samples has {longest} tokens; a shorter limit saves memory and cuts texts"
    limit = _positions(model)
    if limit is not None and limit < length:
        return (
            limit,
            f"the model reads {limit} tokens, and the longest of {len(lengths)} samples has {longest}: it is cut",
        )
    return length, words


def _positions(model: Any) -> int | None:
    """Return the positions of the language model in it, by its configuration; None if it says nothing."""
    limits = []
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        # Vision towers have positions as well, of patches.
        if hasattr(config, "get_text_config") and hasattr(config.get_text_config(), "vocab_size"):
            limits.append(getattr(config.get_text_config(), "max_position_embeddings", None))
    return min((limit for limit in limits if isinstance(limit, int)), default=None)


def as_yaml(params: RunParams, comments: dict[str, str], title: str) -> str:
    """Return the values that are not the defaults as YAML, with a comment above those that have one."""
    lines = [f"# Written by `{without_controls(' '.join(title.split()))}`.", "# Every field: mmfsdp plan --help-all"]
    default = RunParams()
    for section in type(params).model_fields:
        own, usual = getattr(params, section), getattr(default, section)
        if section in comments:
            lines += _comment(comments[section], "")
        body: list[str] = []
        for name in type(own).model_fields:
            value = plain(getattr(own, name))
            place = f"{section}.{name}"
            # A file with the defaults would hide what was chosen, and go stale with them.
            if value == plain(getattr(usual, name)) and place not in comments:
                continue
            body += _comment(comments.get(place, ""), "  ")
            text = yaml.safe_dump({name: _without_empty(value)}, sort_keys=False, allow_unicode=True, width=WIDTH + 20)
            body += textwrap.indent(text, "  ").splitlines()
        if body:
            lines += [f"{section}:", *body]
    return "\n".join(lines) + "\n"


def _without_empty(value: Any) -> Any:
    """Return nested values without those that are unset or empty."""
    if not isinstance(value, dict):
        return value
    return {key: _without_empty(inner) for key, inner in value.items() if inner not in (None, "", [], {})}


def _comment(text: str, indent: str) -> list[str]:
    lines = textwrap.wrap(text[:1].upper() + text[1:], WIDTH - len(indent) - 2, break_on_hyphens=False)
    return [f"{indent}# {line}" for line in lines]
