"""ChatProcessor: samples to batches by the processor and the chat template of a model of transformers.

B rows, L tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad
from transformers.utils.chat_template_utils import render_jinja_template

from ...core.step_batch import LOSS_POSITIONS
from ...params import ParamError
from .batch import ASSISTANT, IGNORE, IMAGE, QUESTION, SYSTEM, USER, Batch, Message, Sample
from .corrupt import CorruptRecord
from .media import own_media_tokens
from .picture_rule import PictureRule, text_tokens
from .pictures import to_rgb
from .processor import SampleProcessor, check_placeholders
from .sample_size import SampleSize, nothing_to_learn, picture_sizes, pictures_beyond

BEFORE_QUESTION, AFTER_QUESTION = QUESTION.split("{}")
BLANK = Sample.of(IMAGE, "blank", (Image.new("RGB", (56, 56)),), "a blank picture")
"""The row that a batch without pictures gets, without loss: its rank enters the vision encoder as the others do."""
TWO_TURNS = Sample.of(IMAGE, "blank", BLANK.images, BLANK.name, [("and", "blank")])
SEVERAL_TURNS = "several-turns"
"""Code of the warning of a template that changes earlier turns."""
WITH_SYSTEM = Sample((Message(SYSTEM, "system text"), Message(USER, "text"), Message(ASSISTANT, "text")), name="system")
NO_SYSTEM = "no-system"
"""Code of the warning of a template that takes no system text."""


@dataclass(frozen=True)
class AsIs:
    """Hold a tensor argument that DDP and FSDP shall leave on the CPU: they move every tensor to the GPU.

    A hook of the model takes the tensor out again, inside of the wrapper.
    """

    tensor: Tensor


@dataclass(frozen=True)
class ChatBatch(Batch):
    """Hold what transformers' processor returns: `media` is all but ids, mask and labels, by the family's own names."""

    samples: int = 0
    """Rows that are samples; one more may hold the blank picture."""
    on_host: frozenset[str] = frozenset()
    """Names of media that stay on the CPU: the forward reads their values there."""

    @property
    def size(self) -> int:
        """Return the number of samples."""
        return self.samples

    def to(self, device: torch.device | str) -> ChatBatch:
        """Return the batch on another device, but for what stays on the CPU."""
        media = {name: tensor for name, tensor in self.media.items() if name not in self.on_host}
        moved = super(ChatBatch, replace(self, media=media)).to(device)
        assert isinstance(moved, ChatBatch)
        return replace(moved, media=moved.media | {name: self.media[name] for name in self.media.keys() - media})

    def inputs(self) -> dict[str, Any]:
        """Return the arguments of `model(**batch.inputs())`, or of `model.generate` if there are no labels."""
        values: dict[str, Any] = {"input_ids": self.input_ids, **self.media}
        for name, tensor in self.media.items():
            if tensor.device != self.input_ids.device:
                values[name] = AsIs(tensor)  # else DDP and FSDP would move it
        if self.attention_mask is not None:
            values["attention_mask"] = self.attention_mask
        if self.labels is not None:
            values |= {"labels": self.labels, "use_cache": False}
        if self.loss_positions is not None:
            values[LOSS_POSITIONS] = self.loss_positions
        return values


@dataclass(frozen=True)
class ChatSample:
    """A conversation as the template writes it."""

    text: str
    images: list[Image.Image]
    answers: list[tuple[int, int]] = field(default_factory=list)
    """Begin and end of the assistant's words in the text, in characters."""
    label: str = ""
    """The label of its sample; see `Sample.label`."""


@dataclass
class ChatProcessor(SampleProcessor):
    """Turn samples into batches by one call of transformers' processor for each.

    Labels are the assistant's words: those that the template marks as generated, else what each answer adds to the
    conversation before it. A batch without pictures gets a row with a blank one.
    """

    resizes_pictures: ClassVar[bool] = True
    processor: Any = field(kw_only=True)
    source: str = field(kw_only=True)
    """The processor's folder or hub name, for errors."""
    given_values: Any = None
    """The model's `GivenValues`: arguments of its forward that it would else read from a GPU; None without."""

    def check(self) -> None:
        """Try one sample with a picture, one of two turns and one with a system text, and fill `warnings`.

        Raises ParamError if the template or the processor cannot be used.
        """
        try:
            sample = self.encode(BLANK)
        except CorruptRecord as error:
            raise ParamError("model.name", f"the chat template of {self.source!r} {error.reason}") from None
        batch = replace(self, max_length=10**9).collate([sample])
        assert batch.labels is not None
        start, end = sample.answers[0] if sample.answers else (0, 0)
        answer = self.tokenizer(sample.text[start:end], add_special_tokens=False).input_ids
        learned = batch.labels[batch.labels != IGNORE].tolist()
        if not learned or self.tokenizer.decode(learned).strip() != self.tokenizer.decode(answer).strip():
            what = f"{type(self.processor).__name__} and the chat template of {self.source!r}"
            message = f"{what} make {self.tokenizer.decode(learned)!r} of the answer {sample.text[start:end]!r}"
            raise ParamError("model.name", f"{message}; mark the answer in it by {{% generation %}}")

        if not self._learns_an_end(learned):
            token = self.tokenizer.eos_token or "an end token"
            self.warnings["no-end"] = (
                f"the chat template of {self.source!r} writes no end token after an answer, so the model does not "
                f"learn to stop; in a copy of its folder, add {token} there in chat_template.jinja, and set model.name "
                "to the copy"
            )
        try:
            self.encode(TWO_TURNS)
        except CorruptRecord as error:
            skipped = "conversations of several turns are skipped, since each"
            self.warnings[SEVERAL_TURNS] = f"with the chat template of {self.source!r} {skipped} {error.reason}"

        try:
            self.encode(WITH_SYSTEM)
        except CorruptRecord as error:
            self.warnings[NO_SYSTEM] = f"samples with a system text are skipped, since each {error.reason}"

    def _learns_an_end(self, learned: list[int]) -> bool:
        """Return whether the tokens that are learned of the blank sample have a special one after its words."""
        start = len(learned) - 1
        while start > 0 and BLANK.text not in self.tokenizer.decode(learned[start:]):
            start -= 1
        ends = {self.tokenizer.eos_token_id, *self.tokenizer.all_special_ids}
        ends |= {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        return bool(ends.intersection(learned[start:]))

    def encode(self, sample: Sample, *, seed: int | None = None) -> ChatSample:
        """Return the conversation as text. Raises CorruptRecord."""
        self._check_tokens(sample)
        messages = self._messages(sample)
        text, answers = self._answers(messages, sample.name)
        return self._with_images(text, sample, list(sample.images), answers)

    def measure(self, sample: Sample) -> SampleSize:
        """Return the length of its row and the tokens of its pictures, by the processor's own rule.

        Raises CorruptRecord for pictures or a whole answer beyond max_length, as `collate` skips them.
        """
        encoded, sizes = self.encode(sample), picture_sizes(sample)
        visual = self._picture_rule.tokens(sizes) if sizes else 0
        length = text_tokens(self, encoded) + visual
        if length > self.max_length:
            token = getattr(self.processor, "image_token", None)
            end = encoded.text.rfind(token) + len(token) if token else 0
            if sizes and text_tokens(self, encoded, end) + visual > self.max_length:
                raise CorruptRecord(sample.name, pictures_beyond(self.max_length, length))
            start, _ = encoded.answers[0]
            if text_tokens(self, encoded, start) + visual >= self.max_length:
                raise CorruptRecord(sample.name, nothing_to_learn(self.max_length, length))
        return SampleSize(min(length, self.max_length), visual, sample.label, sizes)

    @cached_property
    def _picture_rule(self) -> PictureRule:
        return PictureRule(self)

    @cached_property
    def _media_tokens(self) -> frozenset[str]:
        return own_media_tokens(self.processor)

    def _check_tokens(self, sample: Sample) -> None:
        """Raise CorruptRecord for a text with a token that the processor takes for a picture, a video or a sound."""
        for message in sample.messages:
            for token in self._media_tokens:
                if token in message.text:
                    words = (
                        f"has {token} in its text, which {type(self.processor).__name__} writes for pictures or sounds"
                    )
                    raise CorruptRecord(sample.name, f"{words}; remove it, and write {IMAGE} at the place of a picture")

    def collate(self, samples: Sequence[ChatSample]) -> ChatBatch:
        """Return the batch of encoded samples.

        Text beyond max_length is cut. A sample whose pictures or whole answer lie beyond it is skipped, by its label.
        """
        rows = sorted(samples, key=lambda sample: not sample.images)  # Mllama's processor fails on a first row without
        first = 0
        if not any(sample.images for sample in samples):
            rows.insert(0, replace(self.encode(BLANK), answers=[]))
            first = 1
        try:
            values, labels = self._process(rows, side="right")
        except Exception as error:  # a processor may raise any kind
            skipped = {}
            if len(samples) == 1:  # Qwen2-VL's processor takes no 1 x 200
                skipped[samples[0].label] = f"is refused by {type(self.processor).__name__} ({error})"
            else:
                for sample in samples:
                    skipped |= self.collate([sample]).skipped
            if not skipped:  # each can be used alone
                raise
            return self._collate_without(samples, skipped)
        lengths = values["attention_mask"].sum(dim=1).tolist()
        ids = getattr(self.processor, "image_token_ids", None) or [getattr(self.processor, "image_token_id", None)]
        is_image = torch.isin(values["input_ids"], torch.tensor([token for token in ids if token is not None]))
        skipped = {}
        for i, sample in enumerate(rows[first:], first):
            if lengths[i] > self.max_length and bool(is_image[i, self.max_length :].any()):
                skipped[sample.label] = pictures_beyond(self.max_length, lengths[i])
            elif bool((labels[i, 1 : self.max_length] == IGNORE).all()):
                skipped[sample.label] = nothing_to_learn(self.max_length, lengths[i])
        if skipped:  # its pictures may be packed among the others': without it the batch is another
            return self._collate_without(samples, skipped)
        truncated = sum(length > self.max_length for length in lengths[first:])
        limit = max([self.max_length, *lengths[:first]])  # the blank picture stays whole
        media = {}
        for key, tensor in values.items():
            is_of_tokens = tensor.shape[:2] == labels.shape
            media[key] = tensor[:, :limit] if is_of_tokens else tensor
        ids, whole_mask = media.pop("input_ids"), media.pop("attention_mask")
        mask = self.needed_mask(whole_mask)
        on_host = frozenset[str]()
        if self.given_values is not None:
            media |= self.given_values({"input_ids": ids, "attention_mask": mask, **media})
            on_host = self.given_values.on_host & media.keys()
        batch = ChatBatch(
            ids, mask, labels[:, :limit], media, truncated=truncated, samples=len(samples), on_host=on_host
        )
        return replace(
            batch, padded=int((whole_mask == 0).sum()), loss_positions=self.loss_positions(labels[:, :limit])
        )

    def _collate_without(self, samples: Sequence[ChatSample], skipped: dict[str, str]) -> ChatBatch:
        batch = self.collate([sample for sample in samples if sample.label not in skipped])
        return replace(batch, skipped=skipped | batch.skipped)

    def refusal(self, sample: Sample) -> str:
        """Return why a sample cannot be used, whatever its length; "" if it can."""
        return super().refusal(sample) or "".join(replace(self, max_length=10**9)([sample]).skipped.values())

    def prompts(self, samples: Sequence[Sample]) -> ChatBatch:
        """Return a batch of the first questions to generate from, left-padded, without labels. Raises CorruptRecord."""
        rows = []
        for sample in samples:
            messages = self._messages(sample)
            question = messages[: 1 + [message["role"] for message in messages].index(USER)]
            text = self._render(question, sample.name, add_generation_prompt=True)
            rows.append(self._with_images(text, sample, list(sample.images[: sample.prompt.count(IMAGE)]), []))
        values, _ = self._process(rows, side="left")
        ids, mask = values.pop("input_ids"), values.pop("attention_mask")
        return ChatBatch(ids, mask, None, values, samples=len(rows))

    def _messages(self, sample: Sample) -> list[dict[str, Any]]:
        """Return the conversation as chat templates take it. Raises CorruptRecord."""
        messages: list[dict[str, Any]] = []
        if sample.system:
            messages.append({"role": SYSTEM, "content": [{"type": "text", "text": sample.system}]})
        for question, text in sample.questions:
            if not text.strip() or IMAGE in text:
                raise CorruptRecord(sample.name, f"has an answer without text, or with {IMAGE}, which is for questions")
            if sample.verbatim:
                question = question.removeprefix(BEFORE_QUESTION).removesuffix(AFTER_QUESTION)
            content = []
            for i, part in enumerate(question.split(IMAGE)):
                if i:
                    content.append({"type": "image"})
                if part.strip():
                    content.append({"type": "text", "text": part.strip()})
            messages.append({"role": USER, "content": content})
            messages.append({"role": ASSISTANT, "content": [{"type": "text", "text": text.strip()}]})
        return messages

    def _render(self, messages: list[dict[str, Any]], name: str, **options: Any) -> str:
        """Return what the chat template makes of the messages.

        Raises ParamError if it fails, and CorruptRecord with that name if it cannot take the system text.
        """
        try:
            text = self.processor.apply_chat_template(messages, tokenize=False, **options)
        except Exception as error:  # a template may raise any kind
            if messages[0]["role"] == SYSTEM:
                self._render(messages[1:], name, **options)  # raises where the system text is not the reason
                raise self._no_system(name, f"fails with it ({type(error).__name__}: {error})") from None
            reason = f"fails with messages of user and assistant ({type(error).__name__}: {error})"
            raise ParamError("model.name", f"the chat template of {self.source!r} {reason}; correct it") from None
        self._check_system(text, messages, name)
        return text

    def _check_system(self, text: str, messages: list[dict[str, Any]], name: str) -> None:
        """Raise CorruptRecord with that name if a chat template has left out the system text of the messages."""
        if messages[0]["role"] == SYSTEM and messages[0]["content"][0]["text"].strip() not in text:
            raise self._no_system(name, "leaves it out")

    def _no_system(self, name: str, reason: str) -> CorruptRecord:
        fix = "write it into the first question, or correct the template in a copy of the model's folder"
        return CorruptRecord(name, f"has a system text, and the chat template of {self.source!r} {reason}; {fix}")

    def _answers(self, messages: list[dict[str, Any]], name: str) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation, and where each answer begins and ends in it.

        Raises CorruptRecord with that name if the template changes earlier messages when one is added or takes no
        system text, and ParamError if it fails.
        """
        template = self.processor.chat_template
        template = template["default"] if isinstance(template, dict) else template
        if template and "generation %}" in template:
            names: Any = self.tokenizer.special_tokens_map
            if messages[0]["role"] == SYSTEM:
                self._render(messages, name)  # raises if the template takes no system text
            marked: Any = render_jinja_template(
                [messages], chat_template=template, return_assistant_tokens_mask=True, **names
            )
            return marked[0][0], marked[1][0]
        text = self._render(messages, name)
        answers = []
        for i, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before = self._render(messages[:i], name, add_generation_prompt=True)
            after = self._render(messages[: i + 1], name)
            if not (text.startswith(after) and after.startswith(before)):
                words = "cannot be learned from: the chat template changes earlier messages when one is added; "
                raise CorruptRecord(name, words + "mark the answers in it by {% generation %}")
            answers.append((len(before), len(after)))
        return text, answers

    def _with_images(
        self, text: str, sample: Sample, images: list[Image.Image], answers: list[tuple[int, int]]
    ) -> ChatSample:
        """Return the sample. Raises CorruptRecord if its text does not announce its pictures."""
        check_placeholders(sample)
        token = getattr(self.processor, "image_token", None)
        announced = len(images) if token is None else text.count(token)
        if announced != len(images):
            message = f"gives {announced} image tokens {token} for {len(images)} pictures; "
            raise CorruptRecord(sample.name, message + "write one for each, and none in the text")
        return ChatSample(text, [to_rgb(image) for image in images], answers, sample.label)

    def _process(self, rows: Sequence[ChatSample], *, side: str) -> tuple[dict[str, Any], Tensor]:
        """Return what the processor makes of all rows together, and their labels (B, L): the tokens of the answers."""
        bos = self.tokenizer.bos_token
        images = [sample.images for sample in rows] if any(sample.images for sample in rows) else None
        texts = [sample.text for sample in rows]
        _, written, *_ = self.processor.prepare_inputs_layout(images=images, text=texts)  # PaliGemma's has more words
        values = self.processor(
            text=texts,
            images=images,
            images_kwargs={"return_tensors": "pt"},  # else Llama 4's tiles are a list for each picture
            add_special_tokens=not (bos and rows[0].text.startswith(bos)),  # which the template has written
            padding=True,
            padding_side=side,
            return_offsets_mapping=True,
            return_text_replacement_offsets=True,
        )
        pictures = values.pop("text_replacement_offsets", None) or [[]] * len(rows)
        tensors = values.convert_to_tensors("pt").items()
        values = {key: t.float() if t.is_floating_point() else t for key, t in tensors}  # Llama 4's are bfloat16
        if "aspect_ratio_ids" in values:  # transformers 5.23's Mllama leaves out the last rows, if without pictures
            missing = len(rows) - len(values["aspect_ratio_ids"])
            values["aspect_ratio_ids"] = pad(values["aspect_ratio_ids"], (0, 0, 0, missing))
            values["aspect_ratio_mask"] = pad(values["aspect_ratio_mask"], (0, 0, 0, 0, 0, missing), value=1)
        places = values.pop("offset_mapping")  # (B, L, 2): where a token begins and ends, each picture written in full
        ids, mask = values["input_ids"], values["attention_mask"]
        labels = torch.full_like(ids, IGNORE)
        for i, sample in enumerate(rows):
            begins, ends = places[i].unbind(dim=1)
            for start, end in sample.answers:
                added = written[i].index(sample.text[start:end], start) - start
                start, end = start + added, end + added
                shift = sum(len(p["replacement"]) - len(p["text"]) for p in pictures[i] if p["span"][1] <= start)
                inside = (begins < end + shift) & (ends > start + shift) & (mask[i] == 1)
                labels[i, inside] = ids[i, inside]
        if values.pop("labels", None) is not None:  # PaliGemma's 0 are seen by all tokens, 1 by later ones
            values["token_type_ids"] = (labels != IGNORE).long().cummax(dim=1).values
        return values, labels
