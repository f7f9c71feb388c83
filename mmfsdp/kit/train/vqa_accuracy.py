"""VQA accuracy (Antol et al., VQA: Visual Question Answering, ICCV 2015), as an example of a metric of one's own.

An answer counts in full if at least three of ten people gave it. `train.metrics:
[mmfsdp.kit.train.vqa_accuracy:score]`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..data.batch import Sample

PEOPLE = 10
"""Answers of a question in VQA."""
ENOUGH = 3
"""People whose answer is right in full."""
ARTICLES = ("a", "an", "the")
NUMBERS = "zero one two three four five six seven eight nine ten".split()
PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
CONTRACTIONS = """
ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've he's
how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've needn't not've o'clock
oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll somebody's someone'd
someone'd've someone'll someone's something'd something'd've something'll that's there'd there'd've there're there's
they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's what've when's
where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've wouldn't wouldn't've
y'all y'all'll y'all'd've you'd you'd've you'll you're you've
""".split()
APOSTROPHES = {word.replace("'", ""): word for word in CONTRACTIONS}


def score(predictions: Sequence[str], samples: Sequence[Sample]) -> dict[str, float]:
    """Return vqa_accuracy: the mean over the samples, from 0 to 1, each with all its right answers (`truths`)."""
    total = 0.0
    for prediction, sample in zip(predictions, samples, strict=True):
        total += accuracy(prediction, sample.truths)
    return {"vqa_accuracy": total / len(samples)}


def accuracy(prediction: str, answers: Sequence[str]) -> float:
    """Return the accuracy of a prediction: min(matches / 3, 1), averaged over the answers of all people but one.

    With fewer than ten answers each is right in full, as in data sets that have one.
    """
    said = normalized(prediction)
    matches = [normalized(answer) == said for answer in answers]
    if len(matches) < PEOPLE:
        return float(any(matches))
    total = 0.0
    for match in matches:  # each person once is the one whose answer is left out
        total += min((sum(matches) - match) / ENOUGH, 1)
    return total / len(matches)


def normalized(answer: str) -> str:
    """Return an answer as VQA compares answers: small letters, digits, no articles, no punctuation, apostrophes.

    The evaluation of the VQA authors leaves answers as they are where all people gave the same; here, each is
    normalized.
    """
    text = " ".join(answer.split())
    has_number = re.search(r"\d,\d", text) is not None
    without = text
    for mark in PUNCTUATION:
        beside_space = f"{mark} " in text or f" {mark}" in text
        without = without.replace(mark, "" if beside_space or has_number else " ")
    without = re.sub(r"\.(?!\d)", "", without)
    words = []
    for word in without.lower().split():
        word = "0" if word == "none" else word
        word = str(NUMBERS.index(word)) if word in NUMBERS else word
        if word not in ARTICLES:
            words.append(APOSTROPHES.get(word.replace("'", ""), word))
    return " ".join(words)
