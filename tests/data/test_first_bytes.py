"""Files that are not what their names say: recognized by their first bytes as pictures, as shards and as JSON."""

import base64
import io

import pytest
from material import both, picture_bytes
from PIL import Image

from mmfsdp.kit.data.corrupt import MAX_NAME, CorruptRecord
from mmfsdp.kit.data.pictures import open_picture
from mmfsdp.kit.data.rows.row_values import check_file_name
from mmfsdp.kit.data.sources.first_bytes import what_it_is
from mmfsdp.params import ParamError

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
FILES = {
    "empty": (b"", "is empty, so its download went wrong"),
    "pointer": (POINTER, "is a Git LFS pointer and not the file itself; run `git lfs pull`"),
    "page": (b"\n<!DOCTYPE html><html><body>Sign in</body></html>", r"is a web page \(HTML\), so its download"),
    "error": (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "is XML, as servers send it"),
    "heic": (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "is HEIC, which is not read; convert it to JPEG"),
    "svg": (b"<?xml version='1.0'?>\n<svg width='4' height='4'/>", "is SVG; convert it to PNG"),
    "film": (b"\0\0\0\x20ftypisom\0\0\2\0isomiso2avc1mp41", "is a video or sound"),
    "sound": (b"RIFF\x24\0\0\0WAVEfmt ", "is a video or sound"),
    "pdf": (b"%PDF-1.7\n", "is a PDF; convert its pages"),
    "zip": (b"PK\x03\x04\x14\0", "is a zip archive; unpack it"),
    "zstd": (b"\x28\xb5\x2f\xfd\x04\0", "is compressed by zstd, which is not read; unpack it with zstd -d"),
    "parquet": (b"PAR1\x15\x04", "is a Parquet file; set data.source to parquet"),
}


@pytest.mark.parametrize("kind", FILES)
def test_as_a_picture_a_shard_and_json(kind, tmp_path):
    content, words = FILES[kind]
    with pytest.raises(CorruptRecord, match=f"'x' is not a usable picture: it {words}"):
        open_picture(content, name="x")
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(ParamError, match=f"1 skipped; a.tar:0 it {words}"):
        both(tmp_path / "a.tar", "webdataset")
    for name in ("a.json", "a.jsonl"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ParamError, match=f"a.json.* {words}") as error:
            both(tmp_path / name, "json")
        assert error.value.field == "data.path"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP", "AVIF"])
def test_pictures_are_nothing_else(kind):
    out = io.BytesIO()
    Image.new("RGB", (16, 16), "red").save(out, kind)
    assert what_it_is(out.getvalue()) == ""
    assert open_picture(out.getvalue(), name="x").size == (16, 16)


def test_an_empty_file_of_lines_among_others_is_named(tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.png").write_bytes(picture_bytes())
    rows = "".join(f'{{"file_name": "{i}.png", "text": "a dog"}}\n' for i in range(3))
    (tmp_path / "a.jsonl").write_text(rows)
    (tmp_path / "b.jsonl").write_text("")
    train, heldout, skipped = both(tmp_path / "*.jsonl", "json")
    assert len(train + heldout) == 3 and list(skipped) == ["b.jsonl"] and "is empty" in skipped["b.jsonl"]


def icon(kind: str) -> str:
    """Return a picture of four pixels in base64."""
    file = io.BytesIO()
    Image.new("RGB", (2, 2)).save(file, kind)
    return base64.b64encode(file.getvalue()).decode()


SHORT = [icon("PNG"), icon("GIF").rstrip("="), icon("WEBP").replace("+", "-").replace("/", "_")]


@pytest.mark.parametrize("file", ["iVBORw0KGgo" * 90, "data:image/png;base64," + "iVBORw0KGgo" * 90, *SHORT])
def test_a_picture_in_base64_is_named_in_few_letters(file, tmp_path):
    for i in range(2):
        (tmp_path / f"{i}.png").write_bytes(picture_bytes())
    rows = [f'{{"file_name": "{i}.png", "text": "a dog"}}' for i in range(2)]
    rows += [f'{{"image": "{file}", "text": "a dog"}}', f'{{"image": "{file}", "text": "a cat"}}']
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    *_, skipped = both(tmp_path / "rows.jsonl", "json")
    assert list(skipped) == ["rows.jsonl:3", "rows.jsonl:4"]
    for reason in skipped.values():
        assert f"holds a picture in base64 ({len(file)} letters) in place of a file's name; write the" in reason
        assert len(reason) < 200
    table = "image\tcaption\n" + "0.png\ta dog\n1.png\ta dog\n" + f"{file}\ta dog\n"
    (tmp_path / "rows.tsv").write_text(table)
    *_, skipped = both(tmp_path / "rows.tsv", "json")
    assert [f"base64 ({len(file)} letters)" in reason for reason in skipped.values()] == [True]


def test_a_name_that_could_be_base64_is_a_name():
    for name in ("cat", "000000039769", "AAAA", "photos/dog"):
        check_file_name(name)


def test_names_are_cut_and_control_characters_are_written_out():
    error = CorruptRecord("n" * 900, "says \x1b]0;title\x07 and\nmore", "row 3")
    assert len(error.name) == MAX_NAME == 80 and error.label == f"{error.name} (row 3)"
    assert error.reason == "says \\x1b]0;title\\x07 and\\nmore" and "n" * 81 not in str(error)


@pytest.mark.parametrize("file", ["/data/coco/1.jpg", "C:\\coco\\1.jpg", "//server/coco/1.jpg"])
def test_absolute_paths_say_what_to_write(file, tmp_path):
    (tmp_path / "rows.json").write_text(f'[{{"image": {file!r}, "text": "a dog"}}]'.replace("'", '"'))
    fix = r"an absolute path; write it relative to the folder of the pictures \(data.pictures"
    with pytest.raises(ParamError, match=fix):
        both(tmp_path / "rows.json", "json")
