"""Rows of one question and its answers: VQA, ms-swift's query and response, alpaca's instruction, TRL's prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral

from ....params import SourceParams
from ..batch import ASSISTANT, IMAGE, USER
from ..corrupt import Unreadable, shorten
from ..media import is_name_alone
from .row_turns import Conversation, add_pairs, add_turns
from .row_values import Content, Row, first_set, list_in, text_in, texts_in
from .unread import is_set, keys_of

PLACE_KEY = "correct_choice_idx"
"""Key of the place of the right choice (A-OKVQA)."""
ANSWER_KEYS = {
    "question": ("answer", "answers", "multiple_choice_answer", PLACE_KEY),
    "query": ("response", "responses"),
    "instruction": ("output", "outputs"),
    "prompt": ("completion", "response"),
    "problem": ("solution",),
    "user": ("assistant",),
    "input": ("output",),
}
"""Keys of the answer to each key of a question, as data sets have them together."""
OTHER_ANSWER_KEYS = ("response", "answer", "output", "completion", "answers", "target", "targets", "label")
"""Keys of the answer where those of ANSWER_KEYS are not set."""
LISTS_IN_JSON = ("answers", "responses", "outputs")
"""Keys of answers that a table holds as a list in JSON."""
INNER_ANSWER_KEYS = ("answer", "text")
CHOICE_KEYS = ("choices", "options")
CONTEXT_KEYS = ("context", "hint")
"""Keys of what stands before a question and is needed for it."""
INPUT_KEYS = ("input", "inputs")
"""Keys of what an instruction is about."""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def answer_keys(row: Row, question_key: str) -> list[str]:
    """Return the keys that hold the answer to a question of this key; none without an answer."""
    keys = [key for key in ANSWER_KEYS[question_key] if is_set(row.get(key))]
    if not keys:
        keys = [key for key in OTHER_ANSWER_KEYS if is_set(row.get(key)) and not _is_class(key, row)][:1]
    return keys


def _is_class(key: str, row: Row) -> bool:
    """Return whether a key holds the number of a class, which is no text to learn."""
    return key == "label" and isinstance(row[key], (bool, int, float))


def question_key(row: Row) -> str:
    """Return the key of the question of a row; "" if it has none. Raises Unreadable for two."""
    keys = [key for key in ANSWER_KEYS if is_set(row.get(key))]
    if "instruction" in keys and "input" in keys:
        keys.remove("input")  # it belongs to the instruction
    if len(keys) > 1:
        raise Unreadable(f"has {keys[0]!r} and {keys[1]!r}, two questions; keep one of the keys")
    return keys[0] if keys else ""


def read_question(row: Row, params: SourceParams) -> Content:
    """Read a question and its answer or several, with choices, context, history and a system text if there are."""
    key = question_key(row)
    keys = answer_keys(row, key)
    if not keys:
        wanted = ", ".join(ANSWER_KEYS[key])
        raise Unreadable(f"has {key!r} and no answer, which is read under {wanted} (it has {keys_of(row)})")
    # TRL has both forms under the same keys.
    if key == "prompt" and not isinstance(row[key], str):
        return _read_message_lists(row, keys[0])
    if key == "prompt" and keys[0] == "completion":
        return _read_continuation(row)
    conversation = Conversation(row)
    if is_set(row.get("history")):
        add_pairs(conversation, "history", list_in(row, "history"))
    answers = _answers(row, keys)
    conversation.add(USER, _question(row, key))
    if len(answers) > 1 and any(IMAGE in answer for answer in answers):
        raise Unreadable(f"has {IMAGE} in one of several answers; pictures belong to the question")
    conversation.add(ASSISTANT, answers[0])
    conversation.messages[-1] = replace(conversation.messages[-1], answers=tuple(answers[1:]))
    return conversation.content()


def _read_message_lists(row: Row, answer_key: str) -> Content:
    """Read TRL's prompt and completion as lists of messages."""
    conversation = Conversation(row)
    for key in ("prompt", answer_key):
        add_turns(conversation, key, list_in(row, key))
    return conversation.content()


def _read_continuation(row: Row) -> Content:
    """Read TRL's prompt and completion as texts: the completion goes on where the prompt ends, with its spaces."""
    conversation = Conversation(row)
    for role, key in ((USER, "prompt"), (ASSISTANT, "completion")):
        text_in(row, key)  # raises if it is no text
        conversation.add(role, row[key])
    return replace(conversation.content(), verbatim=True)


def _question(row: Row, key: str) -> str:
    """Return the text of a question with what belongs to it, a line for each."""
    lines = [_text_beside(row, context) for context in CONTEXT_KEYS]
    lines.append(text_in(row, key))
    if key == "question":
        choices = _choices(row)
        for letter, choice in zip(LETTERS, choices, strict=False):
            lines.append(f"{letter}. {choice}")
    if key == "instruction":
        lines += [_text_beside(row, extra) for extra in INPUT_KEYS]
    return "\n".join(line for line in lines if line)


def _text_beside(row: Row, key: str) -> str:
    """Return the text that belongs to a question. Raises Unreadable if it is the name of a picture's file."""
    text = text_in(row, key)
    if is_name_alone(text):
        raise Unreadable(f"has {key!r} {shorten(text)!r}, a picture and no text; name it under 'image'")
    return text


def _choices(row: Row) -> list[str]:
    key = first_set(row, CHOICE_KEYS)
    choices = texts_in({key: list_in(row, key)}, key, numbers=True) if key else []
    if len(choices) > len(LETTERS):
        raise Unreadable(f"has {len(choices)} {key}; {len(LETTERS)} are read")
    return choices


def _answers(row: Row, keys: Sequence[str]) -> list[str]:
    """Return the right answers under some keys, the one that a data set names as the right one first."""
    choices = _choices(row) if is_set(row.get("question")) else []
    if choices:
        return [_chosen(row, keys[0], choices)]
    if keys[0] == PLACE_KEY:
        raise Unreadable(f"has {PLACE_KEY!r} and no choices")
    found: dict[str, list[str]] = {}
    for key in keys:
        if key in LISTS_IN_JSON and isinstance(row[key], str) and row[key].lstrip().startswith("["):
            row = {**row, key: list_in(row, key)}
        texts = texts_in(row, key, INNER_ANSWER_KEYS, numbers=True) if key != PLACE_KEY else []
        if texts:
            found[key] = texts
    if not found:
        raise Unreadable(f"has an answer without text under {keys[0]!r}")
    # VQA has its ten answers in a list, and one of them in a field of its own.
    several = max(found.values(), key=len)
    for texts in found.values():
        if texts is several:
            continue
        if len(texts) > 1 or texts[0] not in several:
            names = " and ".join(map(repr, found))
            raise Unreadable(f"has {names}, and other answers in each; keep one of the keys")
        # VQA names the most frequent of its ten answers.
        place = several.index(texts[0])
        several = [texts[0], *several[:place], *several[place + 1 :]]
    return several


def _chosen(row: Row, key: str, choices: Sequence[str]) -> str:
    """Return the choice that an answer names by its place (from 0), its letter or its text."""
    answer = row[key]
    if isinstance(answer, Integral) and not isinstance(answer, bool) and int(answer) in range(len(choices)):
        return choices[int(answer)]
    if isinstance(answer, str):
        text = answer.strip()
        # The text first: a choice may itself be a letter.
        if text in choices:
            return text
        # `(B)`, `b.` and `B` are the same choice.
        letter = text.strip("().").upper()
        if len(letter) == 1 and letter in LETTERS[: len(choices)]:
            return choices[LETTERS.index(letter)]
    words = "write the place of the right one (a number from 0), its letter or its text"
    raise Unreadable(f"has {key!r} {shorten(repr(answer))}, which is none of its {len(choices)} choices; {words}")
