"""OwnProcessor: a person's own processor, `processor(rows) -> dict`, as the loader and the evaluation call one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ...core.step_batch import MappingBatch
from ...own.calls import OwnCodeError, own_errors, own_traceback
from ...params import ParamError
from .corrupt import CorruptRecord
from .own_random import own_random
from .processor import SampleProcessor
from .sources.stream import GivenRow

FIELD = "model.build"
PICTURE_SIDE = 224
"""Side of the pictures that a source draws for a processor without `image_size`, in pixels."""


@dataclass
class OwnBatch(MappingBatch):
    """The keyword arguments of a forward, which an own processor made of some rows."""

    mapping: Mapping[str, Any]
    rows: int
    """Rows that it was made of, B."""
    blank: bool = False
    """No row could be used. Another one stands in, so that this rank takes part in the step, and is not learned."""
    weight: float = 1.0
    source: str = ""
    skipped: dict[str, str] = field(default_factory=dict)
    """Label to reason of the rows that could not be used."""
    truncated: int = 0

    @property
    def size(self) -> int:
        """Return the number of rows, B."""
        return self.rows

    @property
    def label_tokens(self) -> int:
        """Return what the loss is a mean over: labels, or rows if the batch has no `labels`."""
        return 0 if self.blank else super().label_tokens

    def to(self, device: torch.device | str, /) -> OwnBatch:
        """Return the batch with its tensors on a device, those in lists and dicts as well."""
        moved = super().to(torch.device(device)).mapping
        return self._with(dict(moved))

    def pin_memory(self) -> OwnBatch:
        """Return the batch in pinned memory. Called by torch's DataLoader."""
        return self._with(tree_map(lambda v: v.pin_memory() if isinstance(v, torch.Tensor) else v, self.inputs()))

    def new_tokens(self, generated: Any) -> Any:
        """Return what `generate` added to the prompts, where it returns them as well: (B, L) `input_ids` first."""
        prompt = self.mapping.get("input_ids")
        if not isinstance(prompt, torch.Tensor) or not isinstance(generated, torch.Tensor):
            return generated
        length = prompt.shape[1]
        return generated[:, length:] if torch.equal(generated[:, :length], prompt) else generated

    def _with(self, mapping: dict[str, Any]) -> OwnBatch:
        values = {name: value for name, value in vars(self).items() if name != "mapping"}
        return OwnBatch(mapping, **values)


class Encoded(NamedTuple):
    """A row, and the seed of the random numbers that its place in the data gives it."""

    row: Any
    seed: int


@dataclass
class OwnProcessor(SampleProcessor):
    """Calls a person's own processor.

    `own(rows)` gets a list of rows and returns the keyword arguments of the model's forward. If it has a parameter
    `max_length`, it gets `data.max_length`. With `prompts(rows)` and `decode(ids)` it can caption.
    """

    takes_given_rows: ClassVar[bool] = True
    own: Callable[..., Any] = field(kw_only=True)
    path: str = field(default="", kw_only=True)
    """Import path of the function that made it, for errors."""
    stand_in: Any = field(default=None, kw_only=True)
    """A row that can be used, for a batch in which none can."""

    @classmethod
    def of(cls, own: Any, *, path: str) -> OwnProcessor:
        """Return it around what `model.build` returned."""
        side = getattr(own, "image_size", PICTURE_SIDE)
        return cls(None, side if isinstance(side, int) else PICTURE_SIDE, own=own, path=path)

    @property
    def can_prompt(self) -> bool:
        """Return True if it has what captions need: `prompts` and `decode`."""
        return callable(getattr(self.own, "prompts", None)) and callable(getattr(self.own, "decode", None))

    def encode(self, sample: Any, *, seed: int | None = None) -> Encoded:
        """Return the row itself: the processor makes a batch of all rows together."""
        return Encoded(sample, seed or 0)

    def filled(self, samples: list[Any], size: int) -> list[Any]:
        """Return so many rows, some of them twice: what the model computes may need batches of one size."""
        return [samples[i % len(samples)] for i in range(size if samples else 0)]

    def collate(self, samples: Sequence[Encoded]) -> OwnBatch:  # type: ignore[override]
        """Return the batch of some rows.

        A row with which the processor fails is named in `skipped`, and the next good one of the batch takes its place,
        so that every batch has as many rows. Raises OwnCodeError if it fails with all of them together only. Random
        numbers that the processor draws depend on the place of the batch in the data alone.
        """
        with own_random(samples[0].seed if samples else 0):
            return self._batch([sample.row for sample in samples])

    def _batch(self, rows: Sequence[Any]) -> OwnBatch:
        if not rows:
            assert self.stand_in is not None, "set before training"
            return OwnBatch(self._mapping([self.stand_in]), 1, blank=True)
        try:
            return OwnBatch(self._mapping(rows), len(rows))
        except OwnCodeError:
            raise
        except Exception as error:
            skipped = self._unusable(rows)
            if not skipped:
                words = f"the processor of {self.path} failed on {len(rows)} rows together, and on none alone"
                raise _own_error(words, error) from None
        usable = [place for place in range(len(rows)) if place not in skipped]
        chosen = [rows[next_place(usable, place, len(rows))] for place in range(len(rows)) if usable]
        batch = self._batch(chosen)
        batch.skipped |= {label_of_row(rows[place], place): reason for place, reason in skipped.items()}
        return batch

    def try_rows(self, rows: Sequence[Any]) -> OwnBatch:
        """Return the batch of the first rows of the data; from now on the first one that it takes is the stand-in.

        Raises OwnCodeError if the processor takes none of them.
        """
        with own_random(0):
            skipped = self._unusable(rows)
            usable = [row for place, row in enumerate(rows) if place not in skipped]
            if not usable:
                with own_errors(FIELD, f"the processor of {self.path}, on the first row of the data, raised"):
                    self._mapping(rows[:1])
        self.stand_in = usable[0]
        encoded = [self.encode(row) for row in rows]
        batch = self.collate(encoded)
        self.warnings.pop("own-random", None)
        if not same_values(batch.inputs(), self.collate(encoded).inputs()):
            self.warnings["own-random"] = (
                f"model.build: the processor of {self.path} makes another batch of the same rows each time, from "
                "random numbers of its own generator: a resumed run is not as the unbroken one; draw them from the "
                "global generators of Python, NumPy or torch, which are seeded for each batch"
            )
        return batch

    def prompts(self, samples: Sequence[Any]) -> OwnBatch:  # type: ignore[override]
        """Return a batch to generate from."""
        with own_random(0), own_errors(FIELD, f"prompts of the processor of {self.path} raised"):
            values = self.own.prompts(list(map(row_of, samples)))  # type: ignore[attr-defined]
        return OwnBatch(checked_mapping(values, f"prompts of the processor of {self.path}"), len(samples))

    def decode(self, ids: Any) -> list[str]:
        """Return the text of each row of what the model's `generate` returned."""
        with own_errors(FIELD, f"decode of the processor of {self.path} raised"):
            return [str(text) for text in self.own.decode(ids)]  # type: ignore[attr-defined]

    def refusal(self, sample: Any) -> str:
        """Return why a row cannot be used; "" if it can."""
        with own_random(0):
            return self._unusable([sample]).get(0, "")

    def takes(self, sample: Any) -> bool:
        """Return true if a row can be captioned."""
        return self.can_prompt and not self.refusal(sample)

    def _mapping(self, rows: Sequence[Any]) -> Mapping[str, Any]:
        arguments = {"max_length": self.max_length} if takes_argument(self.own, "max_length") else {}
        values = self.own([row_of(row) for row in rows], **arguments)
        return checked_mapping(values, f"the processor of {self.path}")

    def _unusable(self, rows: Sequence[Any]) -> dict[int, str]:
        """Return the places of the rows with which the processor fails alone, and why."""
        reasons: dict[int, str] = {}
        for place, row in enumerate(rows):
            try:
                self._mapping([row])
            except OwnCodeError:
                raise
            except CorruptRecord as error:
                reasons[place] = error.reason
            except Exception as error:
                reasons[place] = f"the processor does not take: {type(error).__name__}: {error}"
        return reasons


def next_place(usable: Sequence[int], place: int, count: int) -> int:
    """Return the next of some places from a place on, around the end of so many."""
    return min(usable, key=lambda other: (other - place) % count)


def row_of(item: Any) -> Any:
    """Return what a person's code gets of an item of a source: the row as its reader gave it, or the Sample."""
    return item.row if isinstance(item, GivenRow) else item


def label_of_row(item: Any, place: int) -> str:
    """Return the name of an item in reports."""
    return getattr(item, "label", "") or f"row {place} of a batch"


def checked_mapping(values: Any, what: str) -> Mapping[str, Any]:
    """Return what a processor made of rows. Raises OwnCodeError if it is no mapping of names to tensors."""
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        words = f"{what} returned a {type(values).__name__}; return a dict of the forward's keyword arguments"
        raise OwnCodeError(FIELD, words)
    if not any(isinstance(value, torch.Tensor) for value in tree_leaves(dict(values))):
        raise OwnCodeError(FIELD, f"{what} returned no tensor under {', '.join(values) or 'no key'}")
    return values


def same_values(one: Any, other: Any) -> bool:
    """Return True if two batches have the same tensors, bit for bit, NaN being as NaN."""
    pairs = zip(tree_leaves(dict(one)), tree_leaves(dict(other)), strict=False)
    for a, b in pairs:
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            if a.shape != b.shape or not torch.equal(a.nan_to_num(), b.nan_to_num()):
                return False
    return True


def takes_argument(function: Any, name: str) -> bool:
    """Return True if a function names a parameter so."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # of no Python function
        return False


def accepted(function: Any, **options: Any) -> dict[str, Any]:
    """Return those of some options that a function takes by name, or by `**kwargs`."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return options
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return options
    return {name: value for name, value in options.items() if name in parameters}


def check_pickles(processor: SampleProcessor) -> None:
    """Raise ParamError if an own processor cannot be sent to the workers that read data."""
    if not isinstance(processor, OwnProcessor):
        return
    try:
        ForkingPickler.dumps(processor.own)  # as a new process gets it
    except Exception as error:
        words = f"the processor of model.build cannot be sent to worker processes ({type(error).__name__}: {error}); "
        fix = "make it a class or a function of its module, not one inside build; or set workers to 0"
        raise ParamError("data.workers", words + fix) from None


def _own_error(words: str, error: Exception) -> OwnCodeError:
    """Return the error of a person's code."""
    text = "".join(own_traceback(error))
    return OwnCodeError(FIELD, f"{words}: {type(error).__name__}: {error}", text)
