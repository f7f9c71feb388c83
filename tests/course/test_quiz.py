"""The quizzes: every answer is text, as it is shown, and its length does not tell whether it is right."""

import yaml
from books import FOLDER, LESSONS
from course.quiz import questions as questions_of
from course.quiz import quiz


def test_every_answer_and_its_reason_is_text():
    # YAML reads an unquoted No as False.
    quizzes = yaml.safe_load((FOLDER / "course" / "questions.yaml").read_text(encoding="utf-8"))
    for lesson, questions in quizzes.items():
        for question in questions:
            choices = [answer["choice"] for answer in question["answers"]]
            assert len(set(choices)) == len(choices), (lesson, choices)
            for text in (question["question"], *choices, *(answer["because"] for answer in question["answers"])):
                assert isinstance(text, str) and text, (lesson, question["question"], text)


def test_each_lesson_has_a_quiz():
    quizzes = yaml.safe_load((FOLDER / "course" / "questions.yaml").read_text(encoding="utf-8"))
    assert sorted(quizzes) == [path.name[:2] for path in LESSONS]
    assert min(map(len, quizzes.values())) >= 3


def test_the_length_of_an_answer_does_not_tell_whether_it_is_right():
    quizzes = yaml.safe_load((FOLDER / "course" / "questions.yaml").read_text(encoding="utf-8"))
    longest, shortest, count = 0, 0, 0
    for questions in quizzes.values():
        for question in questions:
            right, *wrong = [len(answer["choice"]) for answer in question["answers"]]
            longest += right > max(wrong)
            shortest += right < min(wrong)
            count += 1
    assert max(longest, shortest) <= 0.4 * count, (longest, shortest, count)


def test_code_in_a_question_is_shown_as_code_without_its_marks():
    asked = questions_of("01")
    place = next(i for i, each in enumerate(asked) if each["answers"][0]["choice"].endswith("`backward()`"))
    text, buttons, said = quiz("01").children[place].children
    assert "<code>backward()</code>" in text.value and "`" not in text.value
    assert not any("`" in label for label, _ in buttons.options)
    buttons.value = asked[place]["answers"][0]["choice"]
    assert "<b>Right.</b>" in said.value and "`" not in said.value
