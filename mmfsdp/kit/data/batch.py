"""Sample: messages with pictures. Batch: what the model gets, as tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from typing_extensions import Self

from ...core.step_batch import LOSS_POSITIONS
from .corrupt import label_of, shorten

IGNORE = -100
"""Label of a position without loss, as in torch's cross-entropy and in transformers."""
IMAGE = "<image>"
"""The place of a picture in a text."""

SYSTEM, USER, ASSISTANT = ROLES = ("system", "user", "assistant")
QUESTION = "USER: {}\nASSISTANT:\n"
"""The prompt of a question in a conversation, for models without a chat template."""
Turn = tuple[str, str]
"""A prompt and the text that answers it."""


@dataclass(frozen=True)
class Message:
    """Holds what one role says. Each `<image>` in its text is the place of a picture of the sample."""

    role: str
    """system, user or assistant."""

    text: str
    """The words. The assistant's text is learned, except at `<image>`; the others' is given."""

    answers: tuple[str, ...] = ()
    """Further right answers in the place of an assistant's text, as data sets of questions and of captions have."""

    @property
    def truths(self) -> tuple[str, ...]:
        """Return all right answers. Epoch e learns number e modulo their count; evaluation shows the first as truth."""
        return (self.text, *self.answers)

    def for_epoch(self, epoch: int) -> Message:
        """Return the message with the answer of an epoch as its text, and the others as its answers."""
        if not self.answers:
            return self
        first = epoch % len(self.truths)
        text, *answers = self.truths[first:] + self.truths[:first]
        return replace(self, text=text, answers=tuple(answers))


@dataclass(frozen=True)
class Sample:
    """One example: messages, and the pictures at their `<image>` placeholders.

    Messages are a system text or none, then turns of user and assistant. An interleaved document is one assistant
    message. Raises ValueError for other messages.
    """

    messages: tuple[Message, ...]
    """The messages, in order."""

    images: tuple[Image.Image, ...] = ()
    """The pictures, in the order of their placeholders."""

    name: str = ""
    """The sample's name in reports and errors. Records of a source may share it: ids repeat in published data."""

    where: str = ""
    """The place of its record in a file, where others may share its name: a row, a line."""

    verbatim: bool = False
    """A model without a chat template reads the user's text as it stands, as before a caption, without QUESTION."""

    def __post_init__(self) -> None:
        problem = _problem(self.messages)
        if problem:
            raise ValueError(f"messages: sample {shorten(self.name)!r} {problem}")

    @classmethod
    def of(
        cls,
        prompt: str,
        text: str,
        images: tuple[Image.Image, ...] = (),
        name: str = "",
        more: Iterable[Turn] = (),
        where: str = "",
        **fields: Any,
    ) -> Self:
        """Return the sample of a prompt, which is given, and a text, which is learned.

        Args:
            prompt: what stands before the text, word by word, or a question in the form of QUESTION.
            text: the part to learn.
            images: the pictures, in the order of their placeholders in prompt and text.
            name: the sample's name in reports and errors.
            more: further turns, each a prompt and a text.
            where: the place of its record in a file.
            fields: the fields that a subclass adds.
        """
        turns = [(prompt, text), *more]
        verbatim = any(given != QUESTION.format(_question(given)) for given, _ in turns)
        messages: list[Message] = []
        for given, said in turns:
            messages.append(Message(USER, given if verbatim else _question(given)))
            messages.append(Message(ASSISTANT, said))
        return cls(tuple(messages), images, name, where, verbatim, **fields)

    @property
    def label(self) -> str:
        """Return what tells this sample from all others of its source: skipped records are counted by it."""
        return label_of(self.name, self.where)

    @property
    def is_document(self) -> bool:
        """Return whether it is one assistant message to no question."""
        return all(message.role != USER for message in self.messages)

    @property
    def system(self) -> str:
        """Return the system text; empty if there is none."""
        return self.messages[0].text if self.messages[0].role == SYSTEM else ""

    @property
    def questions(self) -> list[Turn]:
        """Return the user's and the assistant's text of each turn, as the messages have them.

        A document is one turn, of which nothing is learned up to its first picture.
        """
        if self.is_document:
            before, placeholder, after = self.messages[-1].text.partition(IMAGE)
            return [(before + placeholder, after)] if placeholder else [("", before)]
        spoken = [message.text for message in self.messages if message.role != SYSTEM]
        return list(zip(spoken[::2], spoken[1::2], strict=True))

    @property
    def turns(self) -> list[Turn]:
        """Return prompt and text of each turn, as a model without a chat template reads them."""
        turns = self.questions
        if not self.verbatim and not self.is_document:
            turns = [(QUESTION.format(question), answer) for question, answer in turns]
        if self.system:
            turns[0] = (f"{self.system}\n{turns[0][0]}", turns[0][1])
        return turns

    @property
    def prompt(self) -> str:
        """Return the given part before the first answer; it carries no loss."""
        return self.turns[0][0]

    @property
    def text(self) -> str:
        """Return the first answer; it carries the loss, except at `<image>`."""
        return self.turns[0][1]

    @property
    def more(self) -> tuple[Turn, ...]:
        """Return the further turns, as (prompt, text)."""
        return tuple(self.turns[1:])

    @property
    def truths(self) -> tuple[str, ...]:
        """Return all right answers to the first question; of a document its text alone."""
        first = next(message for message in self.messages if message.role == ASSISTANT)
        return (self.text, *first.answers)

    def with_prompt(self, prompt: str) -> Self:
        """Return the sample with another prompt in its first turn, without further right answers."""
        asked = Sample.of(prompt, self.text, more=self.more)
        return replace(self, messages=asked.messages, verbatim=asked.verbatim)

    def for_epoch(self, epoch: int) -> Self:
        """Return the sample that an epoch learns: of several right answers each epoch has the next."""
        if not any(message.answers for message in self.messages):
            return self
        return replace(self, messages=tuple(message.for_epoch(epoch) for message in self.messages))


def _question(prompt: str) -> str:
    """Return the question in a prompt: the prompt without what QUESTION writes around it."""
    before, after = QUESTION.split("{}")
    return prompt.removeprefix(before).removesuffix(after)


def _problem(messages: Sequence[Message]) -> str:
    """Return what is wrong with the messages of a sample; "" if nothing is."""
    roles = [message.role for message in messages]
    spoken = roles[1:] if roles[:1] == [SYSTEM] else roles
    turns = len(spoken) // 2
    if spoken in ([ASSISTANT], [USER, ASSISTANT] * max(turns, 1)):
        return ""
    return f"has the roles {', '.join(roles) or 'of none'}; it needs user, assistant, ..., with system before or not"


@dataclass(frozen=True)
class Batch:
    """Tensors of B samples of up to L tokens.

    `media["vision"]` always has T >= 1: a sample with fewer pictures gets blank ones, so that every rank enters every
    unit, whatever its samples are.
    """

    input_ids: Tensor
    """(B, L) int64."""

    attention_mask: Tensor | None
    """(B, L) int64, 0 at padding. None where none is needed: a mask makes attention slower, and the host wait for a GPU
    to read it."""

    labels: Tensor | None
    """(B, L) int64: token ids (the model shifts them), IGNORE where there is no loss. None in a batch of prompts."""

    media: dict[str, Tensor] = field(default_factory=dict)
    """Tensors by modality; vision is (B, T, F, C, H, W) float32: T pictures of F frames."""

    weight: float = 1.0
    """Factor of its source's mean loss in the loss of a step."""

    source: str = ""
    """The source's name in the parameters (data, data.more.0): batches of one source share one mean loss."""

    skipped: dict[str, str] = field(default_factory=dict)
    """Label to reason of the corrupt records that were left out."""

    truncated: int = 0
    """Samples that were cut to max_length."""

    padded: int = 0
    """Positions of `input_ids` that are padding."""

    loss_positions: Tensor | None = None
    """(R,) int64: the positions that predict a label, as `loss_positions` of core/step_batch.py gives them; the head
    then computes nothing for others. None for a model that computes all logits."""

    @property
    def size(self) -> int:
        """Return the number of samples, B."""
        return self.input_ids.shape[0]

    @property
    def label_tokens(self) -> int:
        """Return the number of positions with loss. Labels are shifted: the first token of a sequence has none."""
        return 0 if self.labels is None else int((self.labels[:, 1:] != IGNORE).sum())

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on another device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Return the batch in pinned memory. Called by torch's DataLoader."""
        return self._map(Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        return replace(
            self,
            input_ids=function(self.input_ids),
            attention_mask=None if self.attention_mask is None else function(self.attention_mask),
            labels=None if self.labels is None else function(self.labels),
            loss_positions=None if self.loss_positions is None else function(self.loss_positions),
            media={name: function(tensor) for name, tensor in self.media.items()},
        )

    def new_tokens(self, generated: Tensor) -> Tensor:
        """Return what `generate` added to the prompts (B, L) in its rows (B, L + new)."""
        return generated[:, self.input_ids.shape[1] :]

    def inputs(self) -> dict[str, Any]:
        """Return the arguments of `model(**batch.inputs())`, or of `model.generate` if there are no labels."""
        values: dict[str, Any] = {"input_ids": self.input_ids, "media": self.media}
        if self.attention_mask is not None:
            values["attention_mask"] = self.attention_mask
        if self.labels is not None:
            values["labels"] = self.labels
        if self.loss_positions is not None:
            values[LOSS_POSITIONS] = self.loss_positions
        return values
