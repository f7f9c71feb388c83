"""Folders and shards: what is read, what is skipped and why, what is refused, and the split."""

import bz2
import gzip
import json
import lzma
import shutil

import pytest
from material import PHOTOGRAPHS, both, captions, picture_bytes, write_metadata

from mmfsdp.kit.data import IMAGE, open_source
from mmfsdp.params import DataParams, DataSource, ParamError


@pytest.fixture
def picture_folder(tmp_path):
    """Writes n good pictures, then the given rows and files."""

    def make(rows: list, files: dict[str, bytes] | None = None, good: int = 3):
        folder = tmp_path / "pictures"
        folder.mkdir()
        for name, data in {**{f"{i}.png": picture_bytes() for i in range(good)}, **(files or {})}.items():
            (folder / name).write_bytes(data)
        write_metadata(folder, [{"file_name": f"{i}.png", "text": f"number {i}"} for i in range(good)] + rows)
        return folder

    return make


def as_members(folder) -> dict[str, bytes]:
    """The photographs as members of a shard; every second caption as JSON."""
    members = {}
    for i, (file, text) in enumerate(captions().items()):
        stem, kind = file.split(".")
        members[f"{stem}.{kind}"] = (folder / file).read_bytes()
        members[f"{stem}.{'json' if i % 2 else 'txt'}"] = (json.dumps({"caption": text}) if i % 2 else text).encode()
    return members


def test_real_photographs_from_a_folder(photographs):
    train, heldout, skipped = both(photographs)
    found = {s.name: s.text for s in train + heldout}
    assert found == {**captions(), "people/grace_hopper.jpg": "an officer in a dark coat"}
    assert len(train) == 6 and len(heldout) == 1 and not skipped
    assert all(s.prompt == IMAGE and len(s.images) == 1 and s.images[0].mode == "RGB" for s in train + heldout)
    sizes = {s.name: s.images[0].size for s in train + heldout}
    assert sizes["people/grace_hopper.jpg"] == (512, 600) and sizes["cat.jpg"] == (224, 149)


def test_real_photographs_from_shards_are_those_of_the_folder(photographs, shard):
    members = list(as_members(photographs).items())
    shard("photo-0.tar", dict(members[:6]))
    path = shard("photo-1.tar", dict(members[6:]))
    train, heldout, skipped = both(path.parent / "photo-{0..1}.tar", "webdataset")
    assert {s.text for s in train + heldout} == set(captions().values()) and not skipped
    assert len(train) + len(heldout) == 6 and len(heldout) >= 1
    pixels = {s.text: s.images[0].tobytes() for s in train + heldout}
    assert pixels == {s.text: s.images[0].tobytes() for s in sum(both(PHOTOGRAPHS)[:2], [])}


def test_folder_and_wildcards_name_shards_too_compressed_or_not(photographs, shard, tmp_path):
    path = shard("photo-0.tar", as_members(photographs))
    for form in (path, path.parent, path.parent / "*.tar", path.parent / "photo-[01].tar", path.parent / "phot?-0.tar"):
        assert sum(map(len, both(form, "webdataset")[:2])) == 6
    folder = tmp_path / "a{b"
    for i, compress in enumerate((gzip.compress, bz2.compress, lzma.compress)):
        (folder / str(i)).mkdir(parents=True)
        (folder / str(i) / "photo.tar").write_bytes(compress(path.read_bytes()))
    assert sum(map(len, both(folder / "*/photo.tar", "webdataset")[:2])) == 18
    assert sum(map(len, both(folder / "0", "webdataset")[:2])) == 6
    (folder / "0/photo.tar").rename(folder / "0/photo.TXZ")
    assert sum(map(len, both(folder / "0", "webdataset")[:2])) == 6


def test_damage_of_equal_shard_names_is_told_apart_and_what_is_in_no_record_is_named(shard, tmp_path):
    good = {f"{i}.{kind}": data for i in range(3) for kind, data in {"png": picture_bytes(), "txt": b"good"}.items()}
    path = shard("a.tar", {**good, "a.1.png": picture_bytes(), "a.1.txt": b"dots", "README": b"?"})
    content = path.read_bytes().rstrip(b"\0")  # without the end mark
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.tar").write_bytes(content + bytes(-len(content) % 512))
    train, heldout, skipped = both(tmp_path / "{x,y}/a.tar", "webdataset")
    assert len(train) + len(heldout) == 6
    for name in ("x", "y"):
        assert "a key ends at the first dot; rename its members, as a_1.png" in skipped.pop(f"{name}/a.tar/a")
        assert "is not KEY.EXTENSION" in skipped.pop(f"{name}/a.tar/README")
        assert "has no end mark" in skipped.popitem()[1]


def test_corrupt_records_of_a_folder_are_skipped_by_name(picture_folder):
    cut = (PHOTOGRAPHS / "cat.jpg").read_bytes()[:3000]
    bad = [
        ({"file_name": "cut.jpg", "text": "a cat"}, "cut.jpg", "truncated"),
        ({"file_name": "gone.png", "text": "nothing"}, "gone.png", "FileNotFoundError"),
        ({"file_name": "0.png", "text": " "}, "0.png", "has no caption"),
        ({"file_name": "1.png"}, "1.png", "has no caption"),
        ({"file_name": "2.png", "text": 7}, "2.png", "has 'text', which is of type int and no text"),
        ('{"file_name": "0.png", ', "metadata.jsonl:9", "is not JSON"),
        ('["0.png"]', "metadata.jsonl:10", "is not a JSON object"),
        ({"text": "no file"}, "metadata.jsonl:11", "has no file_name"),
        ({"file_name": "../pictures/0.png", "text": "climbs"}, "metadata.jsonl:12", "leads out of the folder"),
        (
            {"file_name": "/etc/hostname", "text": "absolute"},
            "metadata.jsonl:13",
            "an absolute path; write it relative",
        ),
        ("[" * 100_000, "metadata.jsonl:14", "is not JSON"),
    ]
    train, heldout, skipped = both(picture_folder([row for row, _, _ in bad], {"cut.jpg": cut}))
    assert sorted(s.text for s in train + heldout) == ["number 0", "number 1", "number 2"]
    for line, (_, name, why) in enumerate(bad, start=4):
        label = name if name.startswith("metadata.jsonl") else f"{name} (metadata.jsonl:{line})"
        assert why in skipped.pop(label)
    assert not skipped


def test_corrupt_records_of_shards_are_skipped_by_name(shard):
    good = {f"{i}.{kind}": data for i in range(3) for kind, data in {"png": picture_bytes(), "txt": b"good"}.items()}
    bad = {
        "broken": ({"png": b"no picture", "txt": b"text"}, "is not a usable picture"),
        "silent": ({"png": picture_bytes()}, "has no caption"),
        "empty": ({"png": picture_bytes(), "txt": b" "}, "has no caption"),
        "json": ({"png": picture_bytes(), "json": b"{'single': quotes"}, "is not "),
        "list": ({"png": picture_bytes(), "json": b"[1]"}, "is not "),
        "bytes": ({"png": picture_bytes(), "txt": b"\xff\xfe\xfa"}, "is not "),
        "blind": ({"txt": b"a caption with no picture"}, "has no picture"),
    }
    members = dict(good)
    for key, (files, _) in bad.items():
        members |= {f"{key}.{kind}": data for kind, data in files.items()}
    path = shard("a.tar", members)
    whole = shard("b.tar", good).read_bytes()
    for name, length in {"b.tar": 3500, "c.tar": 0, "d.tar": 2600, "e.tar": 4096}.items():
        (path.parent / name).write_bytes(
            whole[:length]
        )  # within a header, before all, within a picture, between records
    train, heldout, skipped = both(path.parent / "{a,b,c,d,e}.tar", "webdataset")
    names = {"a.tar/0", "a.tar/1", "a.tar/2", "b.tar/0", "d.tar/0", "e.tar/0", "e.tar/1"}
    assert {s.name for s in train + heldout} == names
    for name, why in {
        **{f"a.tar/{key}": why for key, (_, why) in bad.items()},
        "b.tar/1": "has no caption",
        "b.tar:3072": "all bytes from byte 3072 on are lost",
        "c.tar:0": "is empty, so its download went wrong",
        "d.tar/1": "has no caption",
        "d.tar:2048": "all bytes",
        "e.tar:4096": "it has no end mark, so it was cut",
    }.items():
        assert why in skipped.pop(name)
    assert not skipped


def test_what_cannot_be_used_at_all_is_an_error_naming_the_path(tmp_path, picture_folder, shard):
    empty = tmp_path / "empty"
    empty.mkdir()
    useless = picture_folder([{"file_name": "x.png", "text": "x"}, {"file_name": "y.png", "text": ""}], good=0)
    tar = shard("useless.tar", {"a.txt": b"a"})
    for path, source, words in [
        (tmp_path / "none", "folder", "is no folder with a metadata.jsonl"),
        (empty, "folder", "is no folder with a metadata.jsonl"),
        (useless, "folder", r"0 usable records .*2 skipped; x.png \(metadata.jsonl:1\) is not a usable picture"),
        (tmp_path / "{0..3}.tar", "webdataset", "0.tar.* of 4 not found"),
        (empty, "webdataset", "names no .tar file"),
        ("pipe:cat x.tar", "webdataset", "not found"),
        (tar, "webdataset", "0 usable records .*1 skipped; useless.tar/a has no picture"),
    ]:
        with pytest.raises(ParamError, match=words) as error:
            both(path, source)
        assert error.value.field == "data.path" and str(path) in str(error.value)


def test_one_usable_picture_cannot_be_split(picture_folder):
    with pytest.raises(ParamError, match="1 usable records .*one to train on and one to hold out"):
        both(picture_folder([], good=1))


def test_rows_of_one_picture_cannot_be_split_and_the_error_says_why(tmp_path):
    (tmp_path / "x.png").write_bytes(picture_bytes())
    (tmp_path / "rows.jsonl").write_text(json.dumps({"image": "x.png", "text": "a"}) + "\n")
    with pytest.raises(ParamError, match="1 usable records .*; it takes two at least"):
        both(tmp_path / "rows.jsonl", "json")
    (tmp_path / "rows.jsonl").write_text((json.dumps({"image": "x.png", "text": "a"}) + "\n") * 3)
    with pytest.raises(ParamError, match="3 usable records .*; they belong together, by their picture or their id"):
        both(tmp_path / "rows.jsonl", "json")


@pytest.mark.parametrize("fraction", [0.001, 0.3, 0.999])
def test_the_split_is_by_name_alone(picture_folder, fraction):
    folder = picture_folder([], good=40)
    train, heldout, _ = both(folder, heldout_fraction=fraction)
    first, second = {s.name for s in train}, {s.name for s in heldout}
    assert first and second and not first & second and len(first | second) == 40
    if fraction == 0.3:
        assert 4 <= len(second) <= 20
    lines = (folder / "metadata.jsonl").read_text().splitlines()
    (folder / "metadata.jsonl").write_text("\n".join(reversed(lines)))
    assert {s.name for s in both(folder, heldout_fraction=fraction)[1]} == second


def test_splits_that_are_not_there_are_refused(photographs):
    params = DataParams(source=DataSource.FOLDER, path=str(photographs))
    with pytest.raises(ParamError, match="'unseen' is none of source folder; choose train, heldout"):
        open_source(params, split="unseen", image_size=8)
    with pytest.raises(ParamError, match="'test' is none of source folder; choose train, heldout"):
        open_source(params, split="test", image_size=8)


def test_captions_may_be_called_caption_and_metadata_may_lie_below(tmp_path):
    shutil.copytree(PHOTOGRAPHS, tmp_path / "deep" / "er")
    write_metadata(tmp_path / "deep", [{"file_name": "er/cat.jpg", "caption": "again"}])
    train, heldout, skipped = both(tmp_path)
    assert {s.name for s in train + heldout} == {f"deep/er/{file}" for file in captions()} and not skipped
    assert "again" in {s.text for s in train + heldout}
