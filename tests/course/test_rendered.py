"""The pages for the web: one for each lesson, of the notebook as it is now, small, and with nothing that runs."""

import re

import nbformat
import pytest
from books import FOLDER, read
from course.rendered import digest, render

PAGES = FOLDER / "rendered"
BOOKS = sorted(FOLDER.glob("[01][0-9]_*.ipynb"))
WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.mark.parametrize("path", BOOKS, ids=lambda p: p.stem)
def test_each_lesson_has_a_page_that_fits_it(path):
    page = (PAGES / f"{path.stem}.md").read_text()
    is_first = path.name.startswith("00_")
    command = "python -m tests.browser.start_page" if is_first else f"cd notebooks; python -m course.verify {path.name}"
    assert f"<!-- {digest(read(path))} of" in page, f"stale: run `{command}`"
    pictures = re.findall(r"!\[[^]]*\]\(([^)]*)\)", page)
    assert all((PAGES / name).is_file() for name in pictures)
    kept = {f"{path.stem}/{file.name}" for file in (PAGES / path.stem).glob("*")}
    assert kept <= set(pictures), "a picture that no page shows"
    assert len(page.encode()) + sum((PAGES / name).stat().st_size for name in kept) < 300_000
    for link in re.findall(r"\]\(((?:\.\./|\d\d_)[^)#]+)\)", page):
        assert (PAGES / link).exists(), link
    assert f"({path.stem}.md)" in (PAGES / "README.md").read_text()


def test_a_page_shows_text_and_pictures_and_escapes_the_rest(tmp_path):
    v4 = nbformat.v4
    svg = "<svg xmlns='http://www.w3.org/2000/svg' aria-label='a [b]' style='x:y'></svg>"
    page = (
        f"<div><b>rank 0</b><pre>1 &lt; 2</pre><img src='data:image/png;base64,AAAA'>{svg}</div><script>bad()</script>"
    )
    outputs = [
        v4.new_output("stream", text="\x1b[31mred\x1b[0m ``` \n1%\r100%\n"),
        v4.new_output("stream", name="stderr", text="a warning"),
        v4.new_output("display_data", {"image/svg+xml": svg}),
        v4.new_output("display_data", {"text/html": page}),
        v4.new_output("display_data", {WIDGET: {}, "text/plain": "Writing:   0%|          | 0/1 [00:00<?, ?it/s]"}),
        v4.new_output("display_data", {"text/html": "<table><tr><td></td></tr><tr><td>cyan | red</td></tr></table>"}),
    ]
    said = [v4.new_output("stream", text="42")]
    words = v4.new_markdown_cell("see [x](x.ipynb), [y](https://y), [z](02_z.ipynb)")
    tagged = {"metadata": {"tags": ["exercise-01.a"]}}
    solution = v4.new_markdown_cell("<details>42</details>")
    blank = v4.new_notebook(cells=[words, v4.new_code_cell("f()"), v4.new_code_cell("...", **tagged), solution])
    done = [v4.new_code_cell("f()", outputs=outputs), v4.new_code_cell("42", outputs=said)]
    ran = v4.new_notebook(cells=[words, *done, solution])
    render(blank, ran, tmp_path / "a.md")
    text = (tmp_path / "a.md").read_text()
    assert (
        "[x](../x.ipynb), [y](https://y), [z](02_z.md)" in text and "````text\nred ```\n100%\na warning\n````" in text
    )
    assert "![a  b ](a/01.svg)" in text and "```text\nrank 0\n1 < 2\n```" in text
    assert "...\n```\n\n<details>42</details>\n\nWith the solution:\n\n```text\n42\n```" in text
    assert "```text\n  cyan | red\n```" in text and "to click" not in text
    assert "bad()" not in text and "\x1b" not in text
    assert sorted(file.name for file in (tmp_path / "a").iterdir()) == ["01.svg", "02.svg", "03.png"]
    assert "background:#fff" in (tmp_path / "a" / "01.svg").read_text()


def test_of_a_check_a_page_shows_only_what_it_tells_after_a_right_answer(tmp_path):
    v4 = nbformat.v4
    said = ["<div><b>Right.</b> Seen in issue 7.</div>", "<div><b>Right.</b> </div>", "<div><b>Not yet.</b> No.</div>"]
    cells = [v4.new_code_cell(f'check("08.bug{i}")') for i in range(3)]
    done = [v4.new_code_cell("", outputs=[v4.new_output("display_data", {"text/html": text})]) for text in said]
    render(v4.new_notebook(cells=cells), v4.new_notebook(cells=done), tmp_path / "a.md")
    text = (tmp_path / "a.md").read_text()
    assert "\n\n> Right. Seen in issue 7.\n\n" in text
    assert text.count("Right.") == 1 and "Not yet" not in text


def test_each_picture_of_a_page_has_an_alt_text():
    for page in PAGES.glob("*.md"):
        assert "![]" not in page.read_text(), page.name
