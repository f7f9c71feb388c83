"""Conversations in rows: lists of messages with a role, of LLaVA's turns, or of questions with their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ....params import SourceParams
from ..batch import ASSISTANT, IMAGE, ROLES, SYSTEM, USER, Message
from ..corrupt import Unreadable, shorten
from .row_values import (
    NUMBERED_IMAGE,
    Content,
    Picture,
    Row,
    first_key,
    first_set,
    list_in,
    named_pictures,
    picture_from,
    pictures_in,
    place_pictures,
    text_in,
)
from .unread import check_turn_keys, is_set, keys_of

ROLE_OF = {
    "human": USER,
    "user": USER,
    "gpt": ASSISTANT,
    "assistant": ASSISTANT,
    "model": ASSISTANT,
    "bot": ASSISTANT,
    "chatgpt": ASSISTANT,
    "system": SYSTEM,
    "developer": SYSTEM,
}
"""Roles of published data -> ours."""
CONVERSATION_KEYS = ("conversations", "conversation", "dialogue")
"""Keys of a list of turns, as they are published beside `messages`."""
PAIR_LISTS = ("texts", "qa", "qas", "qa_pairs")
"""Keys of a list of questions with their answers."""
SYSTEM_KEYS = ("system", "system_prompt", "system_message")
TURN_KEYS = {"role", "content", "from", "value"}
PAIR_KEYS = (
    ("user", "assistant"),
    ("human", "assistant"),
    ("human", "gpt"),
    ("question", "answer"),
    ("query", "response"),
    ("instruction", "output"),
    ("prompt", "response"),
)
"""Keys of a question and of its answer in one turn."""
TEXT_PARTS = ("text", "input_text", "output_text")
PICTURE_PARTS = ("image", "image_url", "input_image", "image_path", "image_file")
TEXT_PART_KEYS = ("text", "content")
PICTURE_PART_KEYS = ("image", "image_url", "image_path", "path", "url", "bytes", "base64", "source", "content")

Place = Picture | None
"""The picture at an IMAGE of a text: its own picture, or None for the next one of the row."""


def role_of(name: Any) -> str | None:
    """Return the role that a name in published data means; None if it is not read."""
    return ROLE_OF.get(name) if isinstance(name, str) else None


class Conversation:
    """Collects the messages of a row and the places of pictures in them, as they are read turn by turn."""

    def __init__(self, row: Row):
        self.row = row
        self.messages: list[Message] = []
        self.places: list[Place] = []
        image: Any = row.get("image")
        self.named: Mapping[str, Any] = image if named_pictures(image) else {}
        system_key = first_set(row, SYSTEM_KEYS)
        if system_key:
            self.add(SYSTEM, text_in(row, system_key))

    def add(self, role: str, text: str, places: Sequence[Place] | None = None) -> None:
        """Add a message. Without `places`, each IMAGE in its text is the place of a picture of the row."""
        if places is None:
            text, places = self._places_of(text)
        if role == SYSTEM:
            self._check_system(text)
            if self.messages == [Message(SYSTEM, text)]:
                return  # the same text is under a key of the row
        self.messages.append(Message(role, text))
        self.places += places

    def _check_system(self, text: str) -> None:
        if IMAGE in text:
            raise Unreadable(f"has {IMAGE} in its system text; pictures belong to a question or an answer")
        if len(self.messages) == 1 and self.messages[0].role == SYSTEM and self.messages[0].text != text:
            raise Unreadable("has two system texts; keep one")

    def _places_of(self, text: str) -> tuple[str, list[Place]]:
        """Return the text and the place of each picture in it, also of pictures that the row names by their places."""
        places: list[Place] = [None] * text.count(IMAGE)
        if self.named:
            if places:
                raise Unreadable(f"has {IMAGE} in its text, and names its pictures by other places; use one of them")
            for tag in NUMBERED_IMAGE.findall(text):
                if tag not in self.named:
                    raise Unreadable(f"has {tag} in its text, which is not under 'image'")
                places.append(picture_from(self.named[tag], f"image.{tag}"))
            text = NUMBERED_IMAGE.sub(IMAGE, text)
        return text, places

    def content(self, *, in_front: bool = True, is_document: bool = False) -> Content:
        """Return the content of the row. in_front: see `place_pictures`. is_document: it may be one answer alone."""
        pictures = pictures_in(self.row)
        if self.named and self.places:
            if len(self.places) != len(self.named):
                words = f"has {len(self.places)} places of pictures in its text, and {len(self.named)} under 'image'"
                raise Unreadable(words + "; give each picture one place")
            pictures = []
        messages = self.messages
        spoken = [message for message in messages if message.role != SYSTEM]
        roles = [message.role for message in spoken]
        is_document = is_document and roles == [ASSISTANT] and len(messages) == 1
        if not is_document and (not roles or roles != [USER, ASSISTANT] * (len(roles) // 2)):
            said = shorten(", ".join(message.role for message in messages)) or "nobody"
            raise Unreadable(f"has turns of {said}; they must be user, assistant, ..., with system before or not")
        if any(message.role == SYSTEM for message in messages[1:]):
            raise Unreadable("has a system text after its first turn; write it first, or into a question")
        for message in spoken:
            if message.role == ASSISTANT and not message.text:
                raise Unreadable("has an answer without text")
        return place_pictures(messages, self.places, pictures, in_front=in_front)


def read_messages(row: Row, params: SourceParams) -> Content:
    """Read `messages` of role and content: TRL, OpenAI, LLaMA-Factory, Qwen. One assistant message is a document."""
    return _read_turns(row, "messages", in_front=True)


def read_conversations(row: Row, params: SourceParams) -> Content:
    """Read `conversations`: LLaVA's of from and value, in which pictures must have places, or of role and content."""
    key = first_key(row, CONVERSATION_KEYS)
    turns = list_in(row, key)
    is_llava = key == "conversations" and bool(turns) and isinstance(turns[0], Mapping) and "from" in turns[0]
    return _read_turns(row, key, in_front=not is_llava)


def _read_turns(row: Row, key: str, *, in_front: bool) -> Content:
    conversation = Conversation(row)
    turns = list_in(row, key)
    if turns and is_pair(turns[0]):
        add_pairs(conversation, key, turns)
        return conversation.content(in_front=in_front)
    add_turns(conversation, key, turns)
    spoken = [message for message in conversation.messages if message.role != SYSTEM]
    if not in_front and spoken and spoken[0].role == ASSISTANT:
        # An answer to nothing, as ShareGPT's rows may begin. LLaVA's own reader leaves it out, too.
        if IMAGE in spoken[0].text:
            raise Unreadable(f"has {IMAGE} in an answer to nothing; begin with a question")
        conversation.messages.remove(spoken[0])
    return conversation.content(in_front=in_front, is_document=in_front)


def add_turns(conversation: Conversation, key: str, turns: Sequence[Any]) -> None:
    """Add turns of role and content, or of from and value."""
    for i, turn in enumerate(turns):
        if not isinstance(turn, Mapping):
            raise Unreadable(f"has a wrong {key}.{i}: a turn is a dict, and not of type {type(turn).__name__}")
        check_turn_keys(turn, TURN_KEYS)
        # LLaVA and ShareGPT have from and value, all others role and content.
        role_key, text_key = ("from", "value") if is_set(turn.get("from")) else ("role", "content")
        if not is_set(turn.get(role_key)):
            raise Unreadable(
                f"has a turn with {keys_of(turn)}, without a role: it needs from and value, or role and content"
            )
        role = role_of(turn[role_key])
        if role is None:
            name = shorten(str(turn[role_key]))
            raise Unreadable(f"has a turn of role {name!r}; roles that are read are {', '.join(ROLES)}, human and gpt")
        content = turn.get(text_key)
        if isinstance(content, (list, tuple)):
            conversation.add(role, *_text_of_parts(content, f"{key}.{i}.{text_key}"))
        else:
            if not isinstance(content, str):
                kind = type(content).__name__
                raise Unreadable(f"has a wrong {key}.{i}.{text_key}: it is of type {kind} and no text")
            conversation.add(role, content.strip())


def _text_of_parts(parts: Sequence[Any], where: str) -> tuple[str, list[Place]]:
    """Return the text of a message in parts, with IMAGE at each picture, and the places of its pictures."""
    lines: list[str] = []
    places: list[Place] = []
    for i, part in enumerate(parts):
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if not isinstance(part, Mapping):
            raise Unreadable(f"has a wrong {where}.{i}: a part is a text or a dict, not of type {type(part).__name__}")
        kind = part.get("type") or ("text" if is_set(part.get("text")) else first_set(part, PICTURE_PARTS))
        if kind in TEXT_PARTS:
            check_turn_keys(part, {"type", *TEXT_PART_KEYS})
            text = text_in(part, first_set(part, TEXT_PART_KEYS) or "text")
            # A placeholder in the text is a place whose picture the row has in its list.
            places += [None] * text.count(IMAGE)
            if text:
                lines.append(text)
        elif kind in PICTURE_PARTS:
            check_turn_keys(part, {"type", *PICTURE_PART_KEYS})
            if is_set(part.get("text")):
                raise Unreadable(f"has a part of a picture with a text in {where}.{i}; make two parts of it")
            key = first_set(part, PICTURE_PART_KEYS)
            places.append(picture_from(part[key], f"{where}.{i}.{key}") if key else None)
            # Pictures that follow each other stand in one line, as processors join them.
            if lines and lines[-1].endswith(IMAGE):
                lines[-1] += IMAGE
            else:
                lines.append(IMAGE)
        else:
            words = "parts that are read are text, image and image_url"
            raise Unreadable(f"has a part of type {shorten(str(kind))!r} in {where}; {words}")
    return "\n".join(lines), places


def read_pairs(row: Row, params: SourceParams) -> Content:
    """Read a list of questions with their answers: `texts` of user and assistant (the_cauldron, FineVision), `qa`."""
    key = first_key(row, PAIR_LISTS)
    conversation = Conversation(row)
    add_pairs(conversation, key, list_in(row, key))
    return conversation.content()


def add_pairs(conversation: Conversation, key: str, pairs: Sequence[Any]) -> None:
    """Add questions and answers, each pair a dict (PAIR_KEYS) or a list of two texts."""
    for i, pair in enumerate(pairs):
        if isinstance(pair, Mapping):
            keys = _pair_keys(pair)
            if not keys:
                raise Unreadable(f"has a turn with {keys_of(pair)} in {key!r}; it needs user and assistant")
            check_turn_keys(pair, keys)
            question, answer = (text_in(pair, key) for key in keys)
        elif isinstance(pair, (list, tuple)) and len(pair) == 2:
            question, answer = (text_in({key: text}, key) for text in pair)
        else:
            raise Unreadable(f"has a wrong {key}.{i}: it needs a question and its answer")
        if not answer:
            raise Unreadable(f"has a turn without an answer: {key}.{i}")
        conversation.add(USER, question)
        conversation.add(ASSISTANT, answer)


def is_pair(turn: Any) -> bool:
    """Return whether a turn is a question with its answer, and not what one role says."""
    return isinstance(turn, Mapping) and not TURN_KEYS & turn.keys() and bool(_pair_keys(turn))


def _pair_keys(pair: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys of the question and the answer in a turn; none if it has no such pair."""
    return next((keys for keys in PAIR_KEYS if set(keys) <= pair.keys()), ())


def read_question_lists(row: Row, params: SourceParams) -> Content:
    """Read `questions` and `answers`, two lists of one length, each question with its answer (OCR-VQA)."""
    questions, answers = list_in(row, "questions"), list_in(row, "answers")
    if len(questions) != len(answers):
        raise Unreadable(f"has {len(questions)} questions and {len(answers)} answers; each question needs its answer")
    conversation = Conversation(row)
    add_pairs(conversation, "questions", list(zip(questions, answers, strict=True)))
    return conversation.content()
