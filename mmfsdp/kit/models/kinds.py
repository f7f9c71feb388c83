"""Kind: what a run asks of a kind of model.

Each kind is a class in a file of its own, named in params.ModelKind; `model.build` may name a person's own class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from ...core.plan import WrapPlan
from ...params import ModelParams, ParamError, RunParams
from ..data.open_sources import Splits
from ..data.processor import SampleProcessor
from .weight_files import TensorSource


class Built(NamedTuple):
    """A model, and what goes with it."""

    model: Any
    processor: SampleProcessor | None
    """The processor of its samples; None if there is no tokenizer."""
    sources: list[TensorSource] | None
    """Sources of the tensors of its pretrained parts, if they were asked for and can be read one by one."""


class Kind(ABC):
    """A kind of model: how it is built from parameters, planned, and frozen."""

    planned_with_example = False
    """Its modules may run in another order than they are registered, so that its plan needs an example."""
    example_of_data = False
    """Its example is made of the first rows of the data, which are opened as its processor takes them."""
    tensors_by_name = True
    """Its weights may be read or initialized one by one; otherwise rank 0 builds the whole model."""
    vision_encoder = ""
    """Dotted name of the module whose output for a picture can be kept; empty where there is none."""
    generated: tuple[str, ...] = ()
    """Fields of ModelParams whose weights may be `generated`; "model" for the weights of the whole."""
    layouts: Mapping[str, str] = {"from_pretrained": "mmfsdp.kit.compat.export:STATE_DICT"}
    """Layouts of an export, of `params.enums.LAYOUTS`: the import path of each, a compat.layout.Layout."""

    @classmethod
    def of(cls, params: ModelParams) -> Kind:
        """Return the kind of a model of this class."""
        return cls()

    @abstractmethod
    def build(self, params: ModelParams, *, meta: bool, download: bool, read: bool) -> Built:
        """Return the model, trainable in all parts, its processor and, with `read`, the sources of its tensors.

        meta: on the meta device. download: what is not on this machine may be fetched. Raises ParamError.
        """

    def is_built_whole(self, params: ModelParams) -> bool:
        """Return True if `build` is known to find no sources of the tensors. Raises ParamError for a damaged file.

        Rank 0 then need not build the model on the meta device first, to ask for them.
        """
        return False

    def freeze_patterns(self, model: nn.Module, patterns: tuple[str, ...]) -> tuple[str, ...]:
        """Return the patterns of `model.freeze` as patterns of the model's own parameter names. Raises ParamError."""
        return patterns

    @abstractmethod
    def example(
        self,
        model: nn.Module,
        params: RunParams,
        processor: SampleProcessor | None,
        sources: Mapping[str, Splits] | None = None,
    ) -> dict[str, Any] | None:
        """Return the largest inputs of a micro-step, with a picture per sample; None if nobody knows them.

        sources: what `open_sources` gives, if they are open. Raises ParamError if a picture has more tokens than
        `data.max_length`.
        """

    def example_of_pictures(
        self, model: nn.Module, params: RunParams, processor: SampleProcessor | None, pictures: int
    ) -> dict[str, Any] | None:
        """Return the inputs of `example` with so many pictures for each sample; None if nobody knows them.

        Raises ParamError if they have more tokens than `data.max_length`.
        """
        if pictures != 1:
            raise ParamError("fit", f"a model of kind {params.model.kind} has the pictures of its data; ask for batch")
        return self.example(model, params, processor)

    def picture_tokens(self, model: nn.Module, params: RunParams, processor: SampleProcessor | None) -> int:
        """Return the visual tokens of a picture of `example`; 0 if nobody knows them."""
        return 0

    def check_plan(self, model: nn.Module, plan: WrapPlan) -> None:  # noqa: B027 (most kinds need no check)
        """Raise ParamError for a plan with which ranks would not agree on their collectives."""

    def picture_ids(self, model: nn.Module) -> list[int]:
        """Return the tokens of a picture in a text; none if the ids of `example` have a picture already: all but 0."""
        return []

    def few_layers(self, params: ModelParams, folder: Path) -> ModelParams:
        """Return the parameters of a copy with few layers and random weights, to try it; by default the same ones.

        folder: for what the copy is loaded from.
        """
        return params

    def generated_from(self, params: ModelParams) -> list[Any]:
        """Return what the generated weights depend on, as JSON holds it."""
        return []


def kind_of(params: ModelParams) -> Kind:
    """Return the kind of a model."""
    kind: type[Kind] = params.kind.load()
    return kind.of(params)


def check_room(length: int, tokens: int, pictures: int = 1) -> None:
    """Raise ParamError if a sample's pictures have so many tokens that no text fits into `data.max_length`."""
    if tokens >= length:
        whose = "a picture" if pictures == 1 else f"{pictures} pictures"
        raise ParamError("data.max_length", f"{length} is too short for {whose} of {tokens} tokens; raise it")
