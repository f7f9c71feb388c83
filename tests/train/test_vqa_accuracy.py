"""VQA accuracy: the formula of Antol et al. (2015) and the way that answers are made comparable."""

import pytest

from mmfsdp.kit.data.batch import ASSISTANT, USER, Message, Sample
from mmfsdp.kit.train.vqa_accuracy import accuracy, normalized, score


@pytest.mark.parametrize(
    "answer, same",
    [
        ("Yes!", "yes"),
        ("The two dogs", "2 dogs"),
        ("none", "0"),
        ("t-shirt", "t shirt"),
        ("1,000", "1000"),
        ("3.5 feet.", "3.5 feet"),
        ("isnt", "isn't"),
        ("can't", "can't"),
        ("red / blue", "red blue"),
        ("  a \n cat\t", "cat"),
    ],
)
def test_answers_are_compared_without_articles_punctuation_and_words_for_numbers(answer, same):
    assert normalized(answer) == same


@pytest.mark.parametrize("people, expected", [(0, 0.0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1.0), (10, 1.0)])
def test_an_answer_counts_by_the_people_who_gave_it(people, expected):
    # Three people: left out once each, 3 of 10 times two remain (2/3), 7 of 10 times all three (1).
    answers = ["Two"] * people + [f"other {i}" for i in range(10 - people)]
    assert accuracy("2", answers) == pytest.approx(expected)


def test_a_score_is_the_mean_over_samples_with_all_their_answers():
    def sample(*answers: str) -> Sample:
        return Sample((Message(USER, "what?"), Message(ASSISTANT, answers[0], answers[1:])))

    samples = [sample("red", *["red"] * 4, *["blue"] * 5), sample("a cat"), sample("a cat")]
    assert score(["blue", "cat", "dog"], samples) == {"vqa_accuracy": pytest.approx(2 / 3)}
