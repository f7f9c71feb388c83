"""The quizzes: every answer is text, as it is shown."""

import yaml
from books import FOLDER


def test_every_answer_and_its_reason_is_text():
    # YAML reads an unquoted No as False.
    quizzes = yaml.safe_load((FOLDER / "course" / "questions.yaml").read_text(encoding="utf-8"))
    for lesson, questions in quizzes.items():
        for question in questions:
            choices = [answer["choice"] for answer in question["answers"]]
            assert len(set(choices)) == len(choices), (lesson, choices)
            for text in (question["question"], *choices, *(answer["because"] for answer in question["answers"])):
                assert isinstance(text, str) and text, (lesson, question["question"], text)
