"""Data that were published in splits are not trained on what was published for evaluation."""

import json
from pathlib import PurePosixPath

import pytest
from material import both, picture_bytes, write_metadata

from mmfsdp.kit.data import open_source
from mmfsdp.kit.data.open_sources import open_sources
from mmfsdp.kit.data.sources.splits import published_split
from mmfsdp.params import DataParams, ParamError


def write_folder(folder, count: int = 3) -> None:
    """Pictures whose captions are the folder's name and a number."""
    folder.mkdir(parents=True)
    for i in range(count):
        (folder / f"{i}.png").write_bytes(picture_bytes())
    write_metadata(folder, [{"file_name": f"{i}.png", "text": f"{folder.name} {i}"} for i in range(count)])


def texts(path, source="folder", **changes) -> tuple[set[str], set[str]]:
    """The first words of the captions that train, and of those that are held out."""
    train, heldout, skipped = both(path, source, **changes)
    assert not skipped
    return {s.text.split()[0] for s in train}, {s.text.split()[0] for s in heldout}


def note(path, source="folder") -> str:
    notes = open_source(DataParams(source=source, path=str(path)), image_size=8).notes
    return " ".join(notes)


def test_a_published_test_split_is_held_out(tmp_path):
    write_folder(tmp_path / "train")
    write_folder(tmp_path / "test")
    assert texts(tmp_path) == ({"train"}, {"test"})
    assert len(both(tmp_path)[1]) == 3, "all of it, whatever heldout_fraction is"
    assert "published splits: test is held out, the rest trains" in note(tmp_path)


def test_with_a_validation_split_the_test_split_is_not_read(tmp_path):
    for name in ("train", "val", "test"):
        write_folder(tmp_path / "deep" / name)
    write_folder(tmp_path / "deep" / "more")
    assert texts(tmp_path) == ({"train", "more"}, {"val"})
    assert "validation is held out, the rest trains, but test, which is not read" in note(tmp_path)


def test_one_split_alone_is_split_by_names_as_all_data_are(tmp_path):
    write_folder(tmp_path / "test", 40)
    assert texts(tmp_path) == ({"test"}, {"test"}) == texts(tmp_path / "test")
    assert not note(tmp_path)


def test_evaluation_splits_alone_are_refused(tmp_path):
    write_folder(tmp_path / "val")
    write_folder(tmp_path / "test")
    with pytest.raises(ParamError, match="data.path: .*splits validation and test, and none to train on; give"):
        both(tmp_path)


def test_pictures_may_lie_in_folders_of_splits_below_one_metadata_file(tmp_path):
    for name in ("train2017", "val2017"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.png").write_bytes(picture_bytes())
    names = ("train2017", "val2017")
    write_metadata(tmp_path, [{"file_name": f"{name}/0.png", "text": name} for name in names])
    assert texts(tmp_path) == ({"train2017"}, {"val2017"})


def test_files_of_rows_and_shards_are_told_apart_by_their_names(tmp_path, shard):
    (tmp_path / "rows").mkdir()
    for name in ("llava_train", "llava_test"):
        turns = [{"from": "human", "value": "what"}, {"from": "gpt", "value": name}]
        # Pictures may come from another data set's split: only the names of the files of rows count here.
        (tmp_path / "rows" / "coco" / "val2014").mkdir(parents=True, exist_ok=True)
        rows = [{"id": i, "conversations": turns} for i in range(3)]
        (tmp_path / "rows" / f"{name}.json").write_text(json.dumps(rows))
    for name in ("train-00", "train-01", "validation-00"):
        members = {}
        for i in range(3):
            members |= {f"{i}.png": picture_bytes(), f"{i}.txt": f"{name} {i}".encode()}
        shard(f"{name}.tar", members)
    assert texts(tmp_path / "rows", "json") == ({"llava_train"}, {"llava_test"})
    assert texts(tmp_path / "*.tar", "webdataset") == ({"train-00", "train-01"}, {"validation-00"})
    assert "validation is held out" in note(tmp_path / "*.tar", "webdataset")
    names = {s.name for part in both(tmp_path / "*.tar", "webdataset")[:2] for s in part}
    assert "train-00.tar/0" in names and "validation-00.tar/2" in names


def test_a_published_split_without_a_usable_record_is_an_error(tmp_path):
    write_folder(tmp_path / "train")
    write_folder(tmp_path / "test")
    for i in range(3):
        (tmp_path / "test" / f"{i}.png").write_bytes(b"")
    with pytest.raises(ParamError, match="data.path: .*0 usable records in its split test .*3 skipped; .*is empty"):
        open_sources(DataParams(source="folder", path=str(tmp_path)), image_size=1)


@pytest.mark.parametrize(
    ("folders", "file", "split"),
    [
        ("train", "metadata.jsonl", "train"),
        ("a/Validation/b", "", "validation"),
        ("val2017", "", "validation"),
        ("test_images", "", "test"),
        ("train", "test.json", "train"),
        (".", "captions_val2017.json", "validation"),
        (".", "eval-00000-of-00001.tar", "test"),
        (".", "latest.json", ""),
        ("test tubes/trains", "devices.json", ""),
        ("dev_boards", "", ""),
    ],
)
def test_names_of_splits(folders, file, split):
    assert published_split(PurePosixPath(folders), file) == split


def test_heldout_names_another_published_split(tmp_path, shard):
    for name in ("train", "val", "test"):
        write_folder(tmp_path / "pictures" / name)
        members = {}
        for i in range(3):
            members |= {f"{i}.png": picture_bytes(), f"{i}.txt": f"{name} {i}".encode()}
        shard(f"{name}-0.tar", members)
    for path, source in ((tmp_path / "pictures", "folder"), (tmp_path / "*.tar", "webdataset")):
        assert texts(path, source) == ({"train"}, {"val"})
        for word in ("test", "Testing"):
            assert texts(path, source, heldout=word) == ({"train"}, {"test"})
        notes = open_source(DataParams(source=source, path=str(path), heldout="test"), image_size=8).notes
        assert "test is held out, the rest trains, but validation, which is not read" in " ".join(notes)
        with pytest.raises(ParamError, match="data.heldout: 'train' leaves nothing of .* to train on"):
            both(path, source, heldout="train")


def test_heldout_names_other_files_of_the_same_format(tmp_path, shard):
    write_folder(tmp_path / "mine")
    write_folder(tmp_path / "mine" / "part")
    write_folder(tmp_path / "val")
    for name in ("one", "two", "val"):
        shard(f"{name}.tar", {"1.png": picture_bytes(), "1.txt": name.encode()})
    for name in ("a", "b", "c"):
        rows = [{"image": "mine/0.png", "text": f"{name} {i}"} for i in range(3)]
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    for source, path, heldout, expected in [
        ("folder", "mine", "val", ({"mine", "part"}, {"val"})),
        ("folder", "val", "mine", ({"val"}, {"mine", "part"})),
        ("folder", "mine", "mine/part", ({"mine"}, {"part"})),
        ("json", "a.json", "{b,c}.json", ({"a"}, {"b", "c"})),
        ("json", "*.json", "b.json", ({"a", "c"}, {"b"})),
        ("webdataset", "{one,two}.tar", "val.tar", ({"one", "two"}, {"val"})),
        ("webdataset", "*.tar", "two.tar", ({"one"}, {"two"})),
    ]:
        pictures = {"pictures": str(tmp_path)} if source == "json" else {}
        assert texts(tmp_path / path, source, heldout=str(tmp_path / heldout), **pictures) == expected


def test_what_heldout_cannot_be_is_an_error_of_its_field(tmp_path, shard):
    write_folder(tmp_path / "mine")
    (tmp_path / "empty").mkdir()
    write_folder(tmp_path / "bad")
    for i in range(3):
        (tmp_path / "bad" / f"{i}.png").write_bytes(b"")
    tar = shard("one.tar", {"1.png": picture_bytes(), "1.txt": b"a"})
    for source, path, heldout, words in [
        ("folder", "mine", "test", "'test' is no published split of .*mine', which has files of no split; give one"),
        ("folder", "mine", str(tmp_path / "none"), "none' is no folder with a metadata.jsonl"),
        ("folder", "mine", str(tmp_path / "mine"), "holds out all of path"),
        ("folder", "mine", str(tmp_path / "bad"), "bad' holds 0 usable records in its split heldout .*is empty"),
        ("webdataset", tar.name, str(tar), "holds out all of path"),
        ("webdataset", tar.name, "none.tar", "names no .tar file here"),
    ]:
        with pytest.raises(ParamError, match=words) as error:
            both(tmp_path / path, source, heldout=heldout)
        assert error.value.field == "data.heldout"
    with pytest.raises(ParamError, match="heldout_fraction: 0.1 has no effect unless heldout is unset; remove it, or"):
        DataParams(source="json", path="a.json", heldout="b.json", heldout_fraction=0.1)
    with pytest.raises(ParamError, match="heldout: 'test' has no effect unless source is folder"):
        DataParams(heldout="test")
