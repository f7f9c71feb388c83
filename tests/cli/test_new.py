"""`mmfsdp new`: what it finds, what it writes, what it refuses; and a run of what it wrote."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from transformers import CLIPVisionConfig, CLIPVisionModel

from mmfsdp import RunParams
from mmfsdp.kit import cli
from mmfsdp.kit.data import open_splits
from mmfsdp.kit.run.files.folder import read_json
from mmfsdp.kit.run.state import WITHOUT_SENSE
from tests.tiny_run import LANGUAGE, write_language
from tests.tiny_vlms import save_vlm


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for i in range(8):
        Image.new("RGB", (40, 30), "red").save(tmp_path / "data" / f"{i}.png")
    return tmp_path / "data"


def rows(**fields) -> list[dict]:
    return [{"image": f"{i}.png"} | {key: value for key, value in fields.items()} for i in range(8)]


TURNS = [{"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": "a red circle"}]


def write_json(folder):
    (folder / "rows.json").write_text(json.dumps(rows(conversations=TURNS)))


def write_elsewhere(folder):
    """The rows lie above the folder of the pictures."""
    (folder / "images").mkdir()
    for file in folder.glob("*.png"):
        file.rename(folder / "images" / file.name)
    write_json(folder)


def write_table(folder):
    lines = [f"{i}.png,a red circle" for i in range(8)]
    (folder / "rows.csv").write_text("\n".join(["file_name,caption", *lines]))


def write_texts(folder):
    for i in range(8):
        (folder / f"{i}.txt").write_text("a red circle")


def write_classes(folder):
    for i in range(8):
        (folder / ("circle", "square")[i % 2]).mkdir(exist_ok=True)
        (folder / f"{i}.png").rename(folder / ("circle", "square")[i % 2] / f"{i}.png")


def write_parquet(folder):
    table = pa.Table.from_pylist(rows(question="what?", answers=["a circle", "a shape"]))
    pq.write_table(table, folder / "rows.parquet")


@pytest.mark.parametrize(
    ("write", "source", "words"),
    [
        (write_json, "json", ["rows.json: JSON", "conversations of from and value (LLaVA)", "assistant: a red circle"]),
        (write_elsewhere, "json", ["conversations of from and value", "pictures: in"]),
        (write_table, "json", ["rows.csv: a table with named columns", "file_name or image, with text, caption"]),
        (write_texts, "folder", ["text files beside the pictures", "pictures: 40 x 30"]),
        (write_classes, "folder", ["the names of class folders", "note:", "its 2 classes: circle, square"]),
        (write_parquet, "parquet", ["rows.parquet: Parquet", "question with answer", "or: a shape"]),
    ],
)
def test_what_it_finds_is_shown_and_written(write, source, words, folder, capsys):
    write(folder)
    assert cli.main(["new", "my.yaml", "--pictures", "data"]) == 0
    shown = capsys.readouterr().out
    for each in words:
        assert each in " ".join(shown.split()), shown
    assert shown.count("sample:") == 3
    assert all(len(line) <= 80 for line in shown.splitlines())
    params = RunParams.from_yaml("my.yaml")
    assert str(params.data.source) == source and params.data.path == str(folder)
    records = open_splits(params.data, image_size=1)["train"].length
    batch = params.train.batch_size * 2
    assert batch <= records <= params.train.steps * batch < records + batch, "about one epoch on two ranks"
    assert params.data.max_length % 8 == 0 and params.data.max_length <= 64
    text = (folder.parent / "my.yaml").read_text()
    assert "# The demo's backbones" in text and "tokens" in text and "# About one epoch:" in text
    assert cli.main(["plan", "--config", "my.yaml"]) == 0


def test_a_file_that_is_there_stays_and_what_cannot_be_read_is_refused(folder, capsys):
    write_json(folder)
    (folder.parent / "my.yaml").write_text("mine")
    (folder.parent / "void").mkdir()
    (folder.parent / "note.docx").write_text("?")
    (folder.parent / "bad.json").write_text('[{"image": "0.png", "what": "is it"}, {"image": "0.png", "what": "it"}]')
    for line, words in [
        ("my.yaml --pictures data", "file: 'my.yaml' exists already; give another name"),
        ("gone/my.yaml --pictures data", "is in a folder that does not exist; make gone first"),
        ("a.yaml --pictures nothing", "pictures: 'nothing' is neither here nor a name of the hub"),
        ("a.yaml --pictures void", "pictures: 'void' holds nothing that is read: give pictures with metadata.jsonl"),
        ("a.yaml --pictures note.docx", "conversations of from and value (LLaVA)"),
        ("a.yaml --pictures bad.json", "as json: "),
        ("a.yaml --pictures bad.json", "the keys image, what"),
        ("a.yaml --pictures data --vision data", "language: is missing: --vision needs --language, too"),
        ("a.yaml --pictures data --model x --language y", "language: names a part of a model"),
        ("a.yaml --pictures data --model ./gone", "model: './gone' is not a folder"),
    ]:
        assert cli.main(["new", *line.split()]) == 2
        assert words in capsys.readouterr().err
        assert not (folder.parent / "a.yaml").exists()
    assert (folder.parent / "my.yaml").read_text() == "mine"


def test_texts_of_a_file_do_nothing_to_the_terminal(folder, capsys):
    text = "\x1b]0;title\x07 \x1b[31mred\x9b \u202e " + "long " * 90
    (folder / "rows.json").write_text(json.dumps(rows(text=text, **{"na\x1b[2Jme": 1})))
    assert cli.main(["new", "my.yaml", "--pictures", "data"]) == 0
    shown = capsys.readouterr().out
    assert not any(letter in shown + (folder.parent / "my.yaml").read_text() for letter in "\x1b\x07\x9b\u202e")
    assert "long ..." in shown and max(map(len, shown.splitlines())) <= 80


def test_a_whole_model_of_ones_own(folder, capsys):
    write_json(folder)
    save_vlm("qwen2_5_vl", folder.parent / "vlm")
    assert cli.main(["new", "vlm.yaml", "--pictures", "data", "--model", "vlm"]) == 0
    params = RunParams.from_yaml("vlm.yaml")
    assert params.model.name == str(folder.parent / "vlm") and str(params.model.kind) == "transformers"
    assert "# The longest of" in (folder.parent / "vlm.yaml").read_text()
    assert cli.main(["plan", "--config", "vlm.yaml"]) == 0


@pytest.mark.real
def test_what_it_writes_runs_and_names_the_two_bad_rows_of_a_thousand(folder, capsys):
    picture = (folder / "0.png").read_bytes()
    table = [{"image": {"bytes": picture, "path": f"{i}.png"}, "text": "a red circle"} for i in range(1000)]
    table[17]["image"]["bytes"], table[940]["text"] = b"no picture", " "
    pq.write_table(pa.Table.from_pylist(table), "rows.parquet", row_group_size=100)
    assert cli.main(["new", "my.yaml", "--pictures", "rows.parquet"]) == 0
    flags = ["--train.batch-size", "32", "--train.steps", "17", "--train.eval-samples", "4", "--launch.name", "new"]
    unknown = "does not know 33% of the words in the first 100 rows, such as 'a'."
    assert unknown in " ".join(capsys.readouterr().out.split())
    assert cli.main(["run", "--config", "my.yaml", *flags, "--launch.ranks", "2"]) == 0, capsys.readouterr()
    begin, _, end = capsys.readouterr().out.partition("COMPLETED")
    unknown = "does not know 33% of the words"
    assert f"[0] warning: data.path: the model's tokenizer {unknown}" in begin, "in the log, before the first step"
    assert end.startswith(f", {WITHOUT_SENSE}") and unknown in end.partition("truth:")[0], "and beside the captions"
    skipped = read_json("runs/new/result.json")["skipped"]["data"]
    assert set(skipped["reasons"]) == {"rows.parquet:17", "rows.parquet:940"}


def test_two_backbones_of_ones_own(folder):
    write_json(folder)
    write_language(folder.parent / "language", LANGUAGE)
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = CLIPVisionConfig(**sizes, image_size=16, patch_size=8)
    CLIPVisionModel(vision).save_pretrained(folder.parent / "vision")
    words = "--pictures data --vision vision --language language"
    assert cli.main(["new", "both.yaml", *words.split()]) == 0
    params = RunParams.from_yaml("both.yaml")
    assert str(params.model.kind) == "multimodal" and params.model.vision.weights == str(folder.parent / "vision")
    assert "# Flamingo joins the two by gated cross-attention instead" in (folder.parent / "both.yaml").read_text()
    assert cli.main(["plan", "--config", "both.yaml"]) == 0
