"""What a person should know of their data before a run: found when it is opened, and kept beside what was learned."""

import json
import time

import pytest
from PIL import Image
from tiny_run import tiny_run

from mmfsdp.kit import cli
from mmfsdp.kit.run.files.folder import write_json
from mmfsdp.kit.run.files.run_record import RunRecord, RunState, Status, write_status
from mmfsdp.kit.run.files.snapshot import Snapshot
from mmfsdp.kit.run.state import WITHOUT_SENSE, run_state
from mmfsdp.kit.run.trouble import troubles
from mmfsdp.kit.train import data_batch
from mmfsdp.kit.train.notices import LOOKED_AT, few_rows, look_at, notices, unknown_words
from mmfsdp.kit.train.prepare import kept_model, opened, quick_look
from mmfsdp.kit.widgets.data_look import look_at as shown_data
from mmfsdp.kit.widgets.data_look import notices_html
from mmfsdp.kit.widgets.report import caption_cards, report_html
from mmfsdp.params.findings import (
    BY_LENGTH,
    CUT_TEXTS,
    DATA,
    FEW_ROWS,
    PICTURE_VALUES,
    SKIPPED_ROWS,
    UNKNOWN_WORDS,
    Finding,
)
from tests.run.test_runs import record


def told(params) -> dict[str, str]:
    """The notices on a run's data, by their codes."""
    data = opened(params)
    return {each.code: each.message for each in notices(params, data, kept_model(params)[1])}


def with_texts(params, *texts, extremes=((0, 255),)):
    """Let a run have rows with these texts in turn, whose pictures have these extreme values."""
    folder = params.data.path
    rows = []
    for i in range(12):
        low, high = extremes[i % len(extremes)]
        picture = Image.new("L", (20, 20), low)
        picture.putpixel((3, 3), high)
        picture.save(f"{folder}/{i}.png")
        rows.append({"file_name": f"{i}.png", "text": texts[i % len(texts)]})
    with open(f"{folder}/metadata.jsonl", "w") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    return params


def test_data_as_they_should_be_need_no_notice(tmp_path):
    assert told(tiny_run(tmp_path, **{"launch.ranks": 2})) == {}


def test_words_that_the_tokenizer_does_not_know_are_counted_and_named(tmp_path):
    params = with_texts(tiny_run(tmp_path), "a red \x1b[31mhouse", "a red circle")
    data = opened(params)
    look = look_at(data["data"]["train"], kept_model(params)[1])
    share = look.unknown.total() / look.words.total()
    assert set(look.unknown) == {"\x1b[31mhouse"} and 0.1 < share < 0.3
    words = told(params)[UNKNOWN_WORDS]
    assert words.startswith("data.path: the model's tokenizer does not know")
    assert f"{share:.0%} of the words in the first {look.records} rows, such as" in words
    assert "house" in words and "\x1b" not in words
    assert "does not know" in shown_data(params, data), "the cockpit shows it below the path"


def test_a_tokenizer_that_knows_all_words_or_that_is_none_of_transformers_is_asked_in_vain():
    assert unknown_words(object(), ["house"]) == [] == unknown_words(None, [])


def test_rows_that_are_skipped_texts_that_are_cut_and_flat_pictures_are_told(tmp_path):
    params = with_texts(tiny_run(tmp_path), "a red circle " * 10, extremes=((10, 20), (200, 215)))
    (tmp_path / "pictures/3.png").write_bytes(b"no picture")
    found = told(params)
    assert "skipped, as far as they were read: 1; 3.png" in found[SKIPPED_ROWS]
    assert "more than 16 tokens" in found[CUT_TEXTS] and found[CUT_TEXTS].endswith("raise data.max_length")
    assert f"uses more than {100 * 15 / 255:.2g} % of the range" in found[PICTURE_VALUES]
    assert "such as 200 to 215" in found[PICTURE_VALUES]
    assert CUT_TEXTS not in told(params.change(**{"data.max_length": 40}))
    with_texts(params, "a red circle", extremes=((10, 20), (0, 255)))
    assert PICTURE_VALUES not in told(params), "one is not flat"


def test_groups_of_similar_length_that_do_not_fill_micro_steps_are_told(tmp_path):
    params = tiny_run(tmp_path, **{"train.batch_size": 2, "launch.ranks": 2, "data.by_length": 6})
    assert told(params)[BY_LENGTH].endswith("set data.by_length to 8")
    assert BY_LENGTH not in told(params.change(**{"data.by_length": 8}))


def test_no_more_than_the_first_rows_are_read(tmp_path, monkeypatch):
    params = tiny_run(tmp_path)
    data = opened(params)
    source, loads = data["data"]["train"], []
    load = source.load
    monkeypatch.setattr(source, "load", lambda index: loads.append(index) or load(index % 4))
    monkeypatch.setattr(source, "length", 10_000)
    monkeypatch.setattr(source, "skipped", {"one": "is not a picture"})
    found = notices(params, data, kept_model(params)[1])
    assert loads == list(range(LOOKED_AT)) and [each.code for each in found] == [SKIPPED_ROWS]
    assert few_rows(params, data) == {}
    source.notes.append("a note")
    assert notices(params, data, None) == [
        Finding("warning", SKIPPED_ROWS, found[0].message),
        Finding("note", DATA, "data.path: a note"),
    ]
    assert len(loads) == LOOKED_AT, "without a tokenizer there is nothing to look at"


@pytest.fixture
def run_with_unknown_words(finished_run):
    """A run that has ended well, and whose launch told of three things."""
    planned = json.loads((finished_run / "plan.json").read_text())
    of_data = {FEW_ROWS: "few <b>rows", UNKNOWN_WORDS: "does not <b>know", DATA: "how it is split"}
    planned["plan"]["lint"] = [{"level": "warning", "code": code, "message": text} for code, text in of_data.items()]
    write_json(finished_run / "plan.json", planned)
    RunRecord(**vars(record(host="elsewhere", steps=20, created=time.time()))).write(finished_run)
    write_status(finished_run, RunState(Status.COMPLETED))
    return finished_run


def test_a_run_on_words_that_its_model_does_not_know_never_ends_without_saying_so(run_with_unknown_words):
    folder = run_with_unknown_words
    look = Snapshot(folder)
    state = run_state(look)
    assert state.status is Status.COMPLETED and WITHOUT_SENSE in str(state)
    assert [trouble.code for trouble in troubles(look, state)] == [UNKNOWN_WORDS, FEW_ROWS]
    assert "does not &lt;b&gt;know" in caption_cards(folder) and "few" not in caption_cards(folder)
    banner = report_html(folder).partition("Captions of new pictures")[0]
    assert "does not &lt;b&gt;know" in banner and "few &lt;b&gt;rows" in banner and "<b>rows" not in banner


def test_a_damaged_plan_has_no_notices(run_with_unknown_words):
    for damaged in ([], {"plan": []}, {"plan": {"lint": 3}}, {"plan": {"lint": [3, {"code": [1]}]}}):
        write_json(run_with_unknown_words / "plan.json", damaged)
        assert Snapshot(run_with_unknown_words).notices == []
    assert troubles(run_with_unknown_words, RunState(Status.COMPLETED)) == []


def test_plan_says_them_too_as_text_and_as_findings(tmp_path, monkeypatch, capsys):
    params = with_texts(tiny_run(tmp_path), "a red house " * 10)
    params.to_yaml(tmp_path / "mine.yaml")
    expected = told(params)
    assert set(expected) >= {UNKNOWN_WORDS, CUT_TEXTS}
    assert cli.main(["plan", str(tmp_path / "mine.yaml"), "--json"]) == 0
    findings = {each["code"]: each["message"] for each in json.loads(capsys.readouterr().out)["findings"]}
    assert expected.items() <= findings.items()
    assert cli.main(["plan", str(tmp_path / "mine.yaml")]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert all(f"warning: {message}" in words for message in expected.values())
    monkeypatch.setattr(data_batch, "MAX_ENTRIES", 2)
    assert quick_look(params) == (None, []), "a folder of many files is not opened for a plan"
    params.change(**{"data.path": str(tmp_path / "nowhere")}).to_yaml(tmp_path / "none.yaml")
    assert cli.main(["plan", str(tmp_path / "none.yaml")]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "nowhere is not on this machine" in words and "the data were not looked at" in words


def test_several_warnings_are_folded_behind_the_first_and_an_error_never_is():
    error, note = Finding("error", "turns", "bad <i>data"), Finding("note", DATA, "keys are not read")
    warnings = [Finding("warning", str(i), f"number {i} of <b>") for i in range(3)]
    html = notices_html([error, *warnings, note])
    before, _, folded = html.partition("<details")
    folded, _, after = folded.partition("</details>")
    assert "bad &lt;i&gt;data" in before and "keys are not read" in after
    summary, _, others = folded.partition("</summary>")
    assert "3 warnings" in summary and "number 0 of &lt;b&gt;" in summary
    assert "number 0" not in others and all(f"number {i} of &lt;b&gt;" in others for i in (1, 2))
    assert "<details" not in notices_html([error, warnings[0], note])
