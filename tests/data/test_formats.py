"""Formats of files and folders: what each is read as, what is left unread, what is damaged or something else."""

import gzip
import json
import pickle
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from material import both, picture_bytes, write_metadata

import mmfsdp
from mmfsdp.kit.data import IMAGE, open_splits
from mmfsdp.kit.data.sources.file_bytes import FileBytes
from mmfsdp.kit.data.sources.json_scan import PIECE, JsonCursor, NotScanned
from mmfsdp.params import DataParams, ParamError


@pytest.fixture
def folder(tmp_path):
    """Six pictures."""
    for i in range(6):
        (tmp_path / f"{i}.png").write_bytes(picture_bytes())
    return tmp_path


ROWS = [{"file_name": f"{i}.png", "text": f'number {i}, "quoted"\nand more é'} for i in range(6)]


def table(rows=ROWS, separator: str = ",") -> str:
    lines = [separator.join(rows[0])]
    for row in rows:
        lines.append(separator.join('"' + value.replace('"', '""') + '"' for value in row.values()))
    return "\n".join(lines) + "\n"


def read(path, source="json", **changes) -> dict[str, str]:
    """Texts of all samples by name; nothing is skipped."""
    train, heldout, skipped = both(path, source, **changes)
    assert not skipped and train and heldout
    return {sample.name: sample.text for sample in train + heldout}


def notes(path, source) -> str:
    return " ".join(open_splits(DataParams(source=source, path=str(path)), image_size=8)["train"].notes)


JSON_TEXT = json.dumps(ROWS, ensure_ascii=False)
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
TSV = table(separator="\t")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.json", JSON_TEXT.encode()),
        ("rows.json", JSON_TEXT.encode("utf-8-sig")),
        ("rows.json", JSON_TEXT.encode("utf-16")),
        ("rows.json", json.dumps(ROWS, indent=4).encode()),
        ("rows.json.gz", gzip.compress(JSON_TEXT.encode())),
        ("rows.json", gzip.compress(JSON_TEXT.encode())),
        ("rows.jsonl", LINES.encode()),
        ("rows.ndjson", LINES.encode()),
        ("rows.jsonl.gz", gzip.compress(LINES.encode())),
        ("rows.csv", table().encode()),
        ("rows.csv", table().encode("utf-8-sig")),
        ("rows.csv", table().replace("\n", "\r\n").replace("\r\nand", "\nand").encode()),
        ("rows.csv", table(separator=";").encode()),
        ("rows.csv", table(separator="| ").encode()),
        ("rows.csv.gz", gzip.compress(table().encode())),
        ("rows.TSV", TSV.encode()),
        ("rows.tsv", TSV.encode("utf-16")),
        ("rows.tsv.gz", gzip.compress(TSV.encode())),
    ],
)
def test_every_format_gives_the_same_samples(name, content, folder):
    path = folder / name
    path.write_bytes(content)
    texts = sorted(row["text"] for row in ROWS)
    assert sorted(read(path).values()) == texts
    assert sorted(read(folder).values()) == texts, "also by the name of the folder"
    splits = open_splits(DataParams(source="json", path=str(path)), image_size=8)
    copy = pickle.loads(pickle.dumps(splits["train"]))  # as a worker of a loader gets it
    assert [s.text for s in copy] == [s.text for s in splits["train"]]


def test_rows_of_a_table_have_no_empty_cells_and_bad_ones_are_named(folder):
    lines = ["file_name,text,license,", "0.png,a dog,,", "1.png,a cat,,", "2.png,,by,", "3.png,too,many,cells,here"]
    lines += ['4.png,"open "quote",,', "", "5.png,last,by,x"]
    (folder / "rows.csv").write_bytes("\n".join(lines).encode() + b"\n0.png,caf\xe9,,\n")
    train, heldout, skipped = both(folder / "rows.csv", "json")
    assert sorted(s.text for s in train + heldout) == ["a cat", "a dog", "last"]
    assert "has no caption (it has the keys file_name, license)" in skipped.pop("2.png (rows.csv:4)")
    assert "has 5 cells and the table has 4 columns" in (reason := skipped.pop("rows.csv:5"))
    assert "quote a text with a comma" in reason
    assert "is no row of a table" in skipped.pop("rows.csv:6")
    assert "is not UTF-8" in skipped.pop("rows.csv:9")
    assert not skipped
    assert "rows have the keys column 4, license, which are not read" in notes(folder / "rows.csv", "json")


def test_a_quote_that_does_not_end_is_named(folder):
    text = 'file_name\ttext\n0.png\ta\n1.png\tb\n2.png\t"it never ends\n3.png\tlost\n'
    (folder / "rows.tsv").write_text(text)
    *_, skipped = both(folder / "rows.tsv", "json")
    assert list(skipped) == ["rows.tsv:4"] and "unexpected end of data" in skipped["rows.tsv:4"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("rows.csv", b"", "is no table: it is empty"),
        ("rows.csv", b"<!DOCTYPE html>", "is no table: it is a web page"),
        ("rows.csv", b"text,file_name,text\n", "two columns 'text'"),
        ("rows.csv", b"0.png,a dog\n1.png,a cat\n2.png,a cow\n", r"has no caption \(it has the keys 0.png, a dog\)"),
        ("rows.json.gz", gzip.compress(JSON_TEXT.encode())[:-20], "is a damaged gzip file"),
        ("rows.jsonl.gz", gzip.compress(LINES.encode()).replace(b"\n", b"\r"), "is a damaged gzip file"),
        ("rows.json", b"\xff\xfe[\0\x00\xd8\x00", "begins as text in utf-16"),
        ("rows.json", b'[{"a": 1}, {"a": 2]', r"is not JSON \(Expecting ',' delimiter: line 1 column 19"),
        ("rows.json", b"[1, 2] 3", r"is not JSON \(Extra data"),
        ("rows.json", b"[1, 2,", r"is not JSON \(Expecting value"),
        ("rows.json", b'[{"a": "\xff"}]', r"is not JSON \('utf-8' codec"),
        ("rows.json", b"[" * 100_000, "is not JSON"),
        ("rows.json", b'{"images": [{"id": 1}], "annotations": []}', r"not as COCO's.*KeyError: 'file_name'"),
        ("rows.json", b'{"images": [], "annotations": [{"id": 1}]}', r"not as COCO's.*KeyError: 'image_id'"),
        ("rows.json", b'{"images": [{"id": 1, "file_name": "a"}]}', "neither a list of rows nor COCO's"),
        ("rows.json", b"7", "neither a list of rows nor COCO's"),
    ],
)
def test_damaged_files_and_other_ones_are_named(name, content, words, folder):
    (folder / name).write_bytes(content)
    with pytest.raises(ParamError, match=words) as error:
        both(folder / name, "json")
    assert error.value.field == "data.path" and name in str(error.value)


def test_tables_beside_json_are_named_as_not_read(folder):
    (folder / "rows.json").write_text(JSON_TEXT)
    (folder / "labels.csv").write_text("a,b\n1,2\n")
    assert len(read(folder)) == 6 and "labels.csv, not read" in notes(folder, "json")
    assert "not read" not in notes(folder / "rows.json", "json")


def test_metadata_may_be_a_table_and_pictures_that_it_does_not_name_are_told(folder):
    (folder / "metadata.csv").write_text(table(ROWS[:4]))
    assert read(folder, "folder") == {row["file_name"]: row["text"] for row in ROWS[:4]}
    assert "no row names 2 of its pictures: 4.png, 5.png" in notes(folder, "folder")
    write_metadata(folder, ROWS)
    assert len(read(folder, "folder")) == 6
    assert "metadata.csv beside metadata.jsonl, which is read instead" in notes(folder, "folder")


def test_metadata_comes_before_class_folders_and_texts(folder):
    write_metadata(folder, ROWS)
    (folder / "0.txt").write_text("another")
    for name in ("cat", "dog"):
        (folder / name).mkdir()
        (folder / name / "1.png").write_bytes(picture_bytes())
    assert len(read(folder, "folder")) == 6
    assert "no row names 2 of its pictures: cat/1.png, dog/1.png" in notes(folder, "folder")


def test_captions_in_text_files_of_the_pictures_names(folder):
    for i in range(5):
        (folder / f"{i}.txt").write_text(f"number {i}", "utf-8-sig")
    (folder / "4.txt").write_bytes(b"\xff\xfe")
    (folder / "0.jpg").write_bytes(picture_bytes(kind="JPEG"))
    (folder / "README.txt").write_text("no caption")
    (folder / ".hidden.png").write_bytes(b"")
    train, heldout, skipped = both(folder, "folder")
    texts = {f"{i}.png": f"number {i}" for i in range(4)} | {"0.jpg": "number 0"}
    assert {s.label: s.text for s in train + heldout} == texts
    assert train[0].prompt == IMAGE
    assert skipped.pop("5.png") == "has no caption; write it into 5.txt"
    assert "not UTF-8" in skipped.pop("4.png") and not skipped
    assert "README.txt without a picture of the same name, which are not read" in notes(folder, "folder")


def test_class_folders_are_captions_and_their_splits_are_kept(tmp_path):
    for split in ("train", "val"):
        for name in ("golden_retriever", "cat"):
            (tmp_path / split / name).mkdir(parents=True)
            (tmp_path / split / name / "1.png").write_bytes(picture_bytes())
    (tmp_path / "train" / "stray.png").write_bytes(picture_bytes())
    train, heldout, skipped = both(tmp_path, "folder")
    assert {s.name: s.text for s in train} == {
        "train/golden_retriever/1.png": "golden retriever",
        "train/cat/1.png": "cat",
    }
    assert {s.text for s in heldout} == {"golden retriever", "cat"}
    assert skipped == {"train/stray.png": "lies in no folder that names its class"}
    words = notes(tmp_path, "folder")
    assert "captions are the names of the folders of its 2 classes: cat, golden_retriever" in words
    assert "validation is held out" in words


def test_metadata_may_name_pictures_of_another_folder(folder, tmp_path_factory):
    away = tmp_path_factory.mktemp("away")
    write_metadata(away, ROWS)
    assert len(read(away, "folder", pictures=str(folder))) == 6
    (folder / "0.txt").write_text("a caption")
    with pytest.raises(ParamError, match="data.pictures: .*has no effect on pictures that no metadata.jsonl names"):
        both(folder, "folder", pictures=str(folder))


def test_classes_may_hold_the_splits_and_other_folders_may_be_held_out(tmp_path):
    for place in ("cat/train", "cat/val", "dog/train", "dog/val"):
        (tmp_path / "a" / place).mkdir(parents=True)
        (tmp_path / "a" / place / "1.png").write_bytes(picture_bytes())
    for i in range(2):
        (tmp_path / f"{i}.png").write_bytes(picture_bytes())
        (tmp_path / f"{i}.txt").write_text("a cow")
    train, heldout, skipped = both(tmp_path / "a", "folder")
    assert {s.name: s.text for s in train} == {"cat/train/1.png": "cat", "dog/train/1.png": "dog"} and not skipped
    (tmp_path / "b").mkdir()
    for name in ("0.png", "0.txt"):
        (tmp_path / name).rename(tmp_path / "b" / name)
    train, heldout, skipped = both(tmp_path / "a", "folder", heldout=str(tmp_path / "b"))
    assert [s.label for s in heldout] == ["b/0.png"] and heldout[0].text == "a cow" and not skipped


def test_a_single_folder_of_pictures_is_no_class(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "1.png").write_bytes(picture_bytes())
    with pytest.raises(ParamError, match="no folder with a metadata.jsonl, nor with captions of another kind; write"):
        both(tmp_path, "folder")


@pytest.mark.parametrize("size", [PIECE - 40, PIECE - 1, PIECE, 3 * PIECE + 7])
def test_values_that_end_in_another_piece_of_the_file_have_their_byte_ranges(size, tmp_path):
    """Numbers and characters of several bytes lie across the ends of pieces."""
    values = ["é" * (size // 2), *range(100_000, 140_000), {"k": "\U0001f600" * 999}, -1.5e3, None, "é" * size, 12]
    text = " [" + ",\n".join(json.dumps(value, ensure_ascii=False) for value in values) + "]\n"
    (tmp_path / "a.json").write_text(text)
    content = FileBytes(tmp_path / "a.json")
    cursor = JsonCursor(content)
    items = list(cursor.items())
    cursor.end()
    assert [value for _, _, value in items] == values
    for start, end, value in items[:1] + items[-7:]:
        assert json.loads(content.read(start, end)) == value


def test_texts_that_json_refuses_are_refused(tmp_path):
    for text in ("[1 2]", "[1,]", '{"a" 1}', "{1: 2}", '{"a": 1,}', "[1] []", "[tru]", "", "[", '["\x01"]', "[1e]"):
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(NotScanned):
            cursor = JsonCursor(FileBytes(tmp_path / "a.json"))
            if cursor.peek() == "{":
                for _ in cursor.keys():
                    cursor.value()
            elif cursor.peek() == "[":
                list(cursor.items())
            else:
                cursor.value()
            cursor.end()


def test_no_row_is_kept_and_a_file_that_changes_is_refused(folder):
    """Opening 4,000 rows of 2 KB keeps less than 100 bytes for each."""
    rows = [{"file_name": f"{i % 6}.png", "text": "word " * 400, "id": i} for i in range(4_000)]
    path = folder / "rows.json"
    path.write_text(json.dumps(rows))
    open_splits(DataParams(source="json", path=str(path)), image_size=8)  # what it imports is not counted
    tracemalloc.start()
    splits = open_splits(DataParams(source="json", path=str(path)), image_size=8)
    # Python's own tables, such as that of interned names, grow at any time.
    ours = [tracemalloc.Filter(True, f"{Path(mmfsdp.__file__).parent}/*"), tracemalloc.Filter(True, "*/json/*")]
    kept = sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces(ours).traces)
    tracemalloc.stop()
    assert 0 < kept < 100 * len(rows)
    assert splits["train"].load(7).text == ("word " * 400).strip()
    with path.open("r+b") as file:
        file.write(b" ")
    with pytest.raises(ValueError, match="has changed since it was opened"):
        splits["train"].load(8)


def test_absolute_paths_below_the_folder_of_the_pictures_are_read_as_relative_ones(folder):
    relative = [{"image": f"{i}.png", "text": f"{i}"} for i in range(6)]
    absolute = [{"image": str(folder / f"{i}.png"), "text": f"{i}"} for i in range(6)]
    (folder / "a.json").write_text(json.dumps(relative))
    (folder / "b.json").write_text(json.dumps(absolute))
    of_a, of_b = both(folder / "a.json", "json"), both(folder / "b.json", "json", pictures=str(folder))
    assert [s.text for s in of_a[1]] == [s.text for s in of_b[1]], "they are held out together"
    assert len(of_b[0]) == len(of_a[0]) and not of_b[2]
    rows = [{"image": f"{folder}/../{folder.name}/0.png", "text": "climbs"}, {"image": "/etc/0.png", "text": "other"}]
    (folder / "c.json").write_text(json.dumps(relative + rows))
    *_, skipped = both(folder / "c.json", "json")
    assert len(skipped) == 2 and all("an absolute path" in reason for reason in skipped.values())


def test_the_index_has_numbers_only(folder):
    (folder / "rows.jsonl").write_text(LINES)
    records = open_splits(DataParams(source="json", path=str(folder / "rows.jsonl")), image_size=8)[
        "train"
    ].load.__self__
    for name in ("file_of", "row_of", "group_hash", "split_code"):
        assert isinstance(getattr(records, name), np.ndarray)
