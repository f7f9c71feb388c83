"""The minutes of the cards, the exercises, the page of contents, the teaching page and the deck agree."""

import re

from books import FOLDER, LESSONS, ROOT, read, tagged

HALF_DAY = {"00": 15, "01": 35, "02": 55, "03": 45, "08": 55, "05": 30, "06": 15}
"""Minutes of each lesson in half a day, in their order. Two breaks of ten minutes and five at the end come on top."""
BREAKS_AND_END = 10 + 10 + 5
DECK = (ROOT / "slides" / "deck.md").read_text(encoding="utf-8")
TEACHING = (FOLDER / "reference" / "teaching.md").read_text(encoding="utf-8")
SLIDES = {
    "Write DDP: notebook 01": ["01.ring", "01.ddp"],
    "Write FSDP: notebook 02": ["02.shard", "02.refill", "02.moments", "02.predict"],
    "Freeze it: notebook 03": ["03.backward", "03.policies", "03.predict", "03.mend"],
    "Three bugs, in pairs: notebook 08": ["08.bug1", "08.bug2", "08.bug3"],
    "On paper: notebook 05": ["05.fits", "05.bound"],
}
"""Slides on which people work, and the exercises in their tables, row by row; those that are given have no minutes."""
ELSEWHERE = {"02.gather", "01.wire", "01.ledger", "02.traffic", "03.flow", "03.mixed", "05.mfu", "05.roofline"}
"""Exercises in the sections of the half day that are given, answered together at a slide before, or left out."""
WORDS_A_MINUTE = 170
"""Of somebody who reads English as a second language, with figures and code between the lines."""


def card(lesson):
    """The first cell of a lesson."""
    return read(next(FOLDER.glob(f"{lesson}_*.ipynb"))).cells[0].source


def persons_minutes(lesson):
    """What its card says that a person needs."""
    return int(re.search(r"about (\d+) minutes", card(lesson))[1])


def exercise_minutes():
    """Exercise -> its minutes."""
    found = {}
    for path in LESSONS:
        text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
        for name, minutes in re.findall(r"\*\*Exercise ([\w.-]+)\.\*\* \((\d+) minutes", text):
            found[name] = int(minutes)
    return found


def slide(title):
    """The text of the slide with this title."""
    return next(text for text in DECK.split("\n---\n") if text.strip().startswith(f"## {title}\n"))


def test_the_half_day_of_the_teaching_page_is_that_of_the_course():
    table = TEACHING[TEACHING.index("## Half a day") : TEACHING.index("## Two days")]
    rows = re.findall(r"^\| \d:\d\d \| (\d+) \|.*\| ([^|]*)\|$", table, re.MULTILINE)
    lessons = {re.search(r"`(\d\d)`", notebook)[1]: int(minutes) for minutes, notebook in rows if "`" in notebook}
    assert lessons == HALF_DAY and list(lessons) == list(HALF_DAY)
    assert sum(int(minutes) for minutes, _ in rows) == sum(HALF_DAY.values()) + BREAKS_AND_END == 275


def test_the_deck_says_the_same_minutes():
    rows = re.findall(r"^\| (\d+) \|.*\| ([\d, ]+) \|$", slide("Today"), re.MULTILINE)
    end = 5
    for minutes, lessons in rows:
        wanted = sum(HALF_DAY[lesson] for lesson in lessons.split(", "))
        assert int(minutes) == wanted + (end if lessons.endswith("06") else 0), lessons
    assert ", ".join(lessons for _, lessons in rows).split(", ") == list(HALF_DAY)
    assert "Two breaks of ten minutes" in slide("Today")


def test_the_page_of_contents_names_the_lessons_of_the_half_day():
    contents = read(FOLDER / "contents.ipynb").cells[0].source
    line = next(line for line in contents.split("\n") if line.startswith("In half a day"))
    named = re.findall(r"\b(\d\d)\b", line.partition(":")[2].replace("00 to 03", "00, 01, 02, 03"))
    assert sorted(named) == sorted(HALF_DAY)
    assert "a little more than four and a half hours" in line


def test_cards_have_the_minutes_of_the_class():
    assert persons_minutes("01") == HALF_DAY["01"]
    for lesson in ("02", "03"):
        assert f"(in half a day: {HALF_DAY[lesson]})" in card(lesson) and persons_minutes(lesson) > HALF_DAY[lesson]
    assert f"(the first three bugs, in pairs: {HALF_DAY['08']})" in card("08")
    for lesson in ("05", "06"):
        assert persons_minutes(lesson) > HALF_DAY[lesson], "in half a day, sections of it"


def test_two_days_leave_time_for_every_lesson():
    table = TEACHING[TEACHING.index("## Two days") : TEACHING.index("## Play a run")]
    rows = re.findall(r"^\| (\d) \| ([\d +]+) \|[^|]*\| ?([^|\n]*)\|$", table, re.MULTILINE)
    days = {"1": 0, "2": 0}
    planned = {}
    for day, minutes, notebook in rows:
        parts = [int(part) for part in minutes.split("+")]
        days[day] += sum(parts)
        planned |= dict(zip(re.findall(r"`(\d\d)`", notebook), parts, strict=False))
    assert max(days.values()) <= 6 * 60
    for path in LESSONS:
        lesson = path.name[:2]
        if lesson != "08":  # as many of its bugs as there is time for
            assert planned[lesson] >= persons_minutes(lesson), lesson


def test_slides_say_the_minutes_of_their_exercises():
    minutes = exercise_minutes()
    for title, exercises in SLIDES.items():
        rows = re.findall(r"^\| *(.*?) *\|.* (\d+) \|$", slide(title), re.MULTILINE)
        assert [int(number) for _, number in rows] == [minutes[name] for name in exercises], title
        given = int(re.search(r"^\((\d+) min\)", slide(title).partition("Note:\n")[2])[1])
        assert sum(int(number) for first, number in rows if first != "early?") <= given, title


def test_half_of_the_time_is_for_exercises():
    assert "half of the time is theirs" in DECK
    given = [int(re.search(r"^\((\d+) min\)", slide(title).partition("Note:\n")[2])[1]) for title in SLIDES]
    assert sum(given) >= (sum(HALF_DAY.values()) + BREAKS_AND_END) / 2


def words(text):
    """How many words there are to read; code and formulas count as one."""
    return len(re.findall(r"\w+", re.sub(r"\$.*?\$|`[^`]*`", " x ", text)))


def text_of(path, last=None):
    """What students read of a lesson, without the solutions; last: up to the end of the section with this exercise."""
    cells = [c for c in read(path).cells if c.cell_type == "markdown" and not tagged(c, "solution")]
    sections = re.split(r"(?m)^(?=## )", "\n\n".join(cell.source for cell in cells))
    if last is None:
        return "".join(sections)
    end = next(i for i, section in enumerate(sections) if f"**Exercise {last}.**" in section)
    return "".join(sections[: end + 1])


def test_a_person_alone_has_the_minutes_to_read_and_to_write():
    minutes = exercise_minutes()
    for path in LESSONS:
        text = text_of(path)
        own = sum(minutes[name] for name in re.findall(r"\*\*Exercise ([\w.-]+)\.\*\*", text))
        assert own + words(text) / WORDS_A_MINUTE <= persons_minutes(path.name[:2]), path.name


def test_a_class_has_the_minutes_to_read_and_to_write():
    minutes = exercise_minutes()
    for title, exercises in SLIDES.items():
        rows = re.findall(r"^\| *(.*?) *\|.* (\d+) \|$", slide(title), re.MULTILINE)
        done = [name for name, (first, _) in zip(exercises, rows, strict=True) if first != "early?"]
        text = text_of(next(FOLDER.glob(f"{title[-2:]}_*.ipynb")), last=done[-1])
        assert set(re.findall(r"\*\*Exercise ([\w.-]+)\.\*\*", text)) <= set(done) | ELSEWHERE, title
        given = int(re.search(r"^\((\d+) min\)", slide(title).partition("Note:\n")[2])[1])
        assert sum(minutes[name] for name in done) + words(text) / WORDS_A_MINUTE <= given, title


def test_ninety_minutes_are_ninety():
    table = TEACHING[TEACHING.index("## Ninety minutes") : TEACHING.index("## Two days")]
    assert sum(map(int, re.findall(r"^\| (\d+) \|", table, re.MULTILINE))) == 90
    given = re.search(r"^\| (\d+) \| write FSDP", table, re.MULTILINE)
    notes = slide("Write FSDP: notebook 02").partition("Note:\n")[2]
    assert int(given[1]) >= int(re.search(r"^\((\d+) min\)", notes)[1])
