"""Data sets of the hub: saved to disk, from files in a folder, by name without a network."""

import json
import pickle

import datasets
import pytest
from material import both, picture_bytes, write_metadata

from mmfsdp.kit.data import open_splits
from mmfsdp.params import DataParams, ParamError
from tests.processes import in_fresh_python

PICTURE = picture_bytes()


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """The cache of datasets in a folder of the test, and no bars of progress."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def rows_of(name: str, count: int = 4, **fields) -> datasets.Dataset:
    rows = {"image": [{"bytes": PICTURE, "path": f"{i}.png"} for i in range(count)]}
    rows["text"] = [f"{name} {i}" for i in range(count)]
    rows |= {key: [value] * count for key, value in fields.items()}
    features = datasets.Dataset.from_dict({key: rows[key] for key in rows if key != "image"}).features
    return datasets.Dataset.from_dict(rows, features=datasets.Features({"image": datasets.Image(), **features}))


def save(path, **splits: datasets.Dataset) -> str:
    datasets.DatasetDict(splits).save_to_disk(path)
    return str(path)


def texts(path, **changes) -> tuple[set[str], set[str]]:
    train, heldout, skipped = both(path, "hub", **changes)
    assert not skipped
    return {s.text.split()[0] for s in train}, {s.text.split()[0] for s in heldout}


def test_published_splits_are_kept_and_heldout_chooses(tmp_path):
    path = save(tmp_path / "a", **{name: rows_of(name) for name in ("train", "validation", "test", "testmini")})
    other = save(tmp_path / "b", train=rows_of("other"))
    assert texts(path) == ({"train", "testmini"}, {"validation"})
    assert texts(path, heldout="test") == ({"train", "testmini"}, {"test"})
    assert texts(path, heldout="testmini") == ({"train"}, {"testmini"})
    assert texts(path, heldout=other) == ({"train", "testmini"}, {"other"})
    with pytest.raises(
        ParamError, match="data.heldout: 'mini' is no split of .*, which has train, validation, test, te"
    ):
        texts(path, heldout="mini")


def test_bad_pictures_of_a_single_data_set_are_named_and_do_not_end_it(tmp_path):
    good = rows_of("good", 30, license="by")
    rows = [good[:]["text"], [{"bytes": PICTURE, "path": None} for _ in range(30)]]
    rows[1][7] = {"bytes": b"no picture", "path": "7.png"}
    bad = datasets.Dataset.from_dict({"text": rows[0], "image": rows[1], "license": ["by"] * 30})
    bad.cast_column("image", datasets.Image()).save_to_disk(tmp_path / "a")
    train, heldout, skipped = both(tmp_path / "a", "hub", heldout_fraction=0.3)
    assert list(skipped) == ["rows:7"] and "is not a usable picture" in skipped["rows:7"]
    assert len(train + heldout) == 29 and len(heldout) > 2
    source = open_splits(DataParams(source="hub", path=str(tmp_path / "a")), image_size=8)["train"]
    assert "rows have the keys license, which are not read" in " ".join(source.notes)
    assert [s.text for s in pickle.loads(pickle.dumps(source))] == [s.text for s in source]


def test_lists_of_pictures_and_conversations(tmp_path):
    turns = [{"user": "what?", "assistant": "a pet"}]
    rows = {"images": [[{"bytes": PICTURE, "path": f"{i}.png"}] * 2 for i in range(5)], "texts": [turns] * 5}
    data = datasets.Dataset.from_dict(rows).cast_column("images", datasets.Sequence(datasets.Image()))
    data.save_to_disk(tmp_path / "a")
    train, heldout, skipped = both(tmp_path / "a", "hub")
    assert not skipped and len(train + heldout) == 5
    assert all(len(s.images) == 2 and s.text == "a pet" for s in train + heldout)


def test_classes_are_their_names(tmp_path):
    names = datasets.ClassLabel(names=["cat", "golden_retriever"])
    rows = {"image": [{"bytes": PICTURE, "path": None}] * 4, "text": [0, 1, 0, 1]}
    features = datasets.Features({"image": datasets.Image(), "text": names})
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "a")
    train, heldout, skipped = both(tmp_path / "a", "hub")
    assert {s.text for s in train + heldout} == {"cat", "golden retriever"} and not skipped


def test_classes_are_captions_where_nothing_else_is_said(tmp_path):
    for name in ("cat", "golden_retriever"):
        (tmp_path / "a" / name).mkdir(parents=True)
        for i in range(3):
            (tmp_path / "a" / name / f"{i}.png").write_bytes(PICTURE)
    train, heldout, skipped = both(tmp_path / "a", "hub")
    assert {s.text for s in train + heldout} == {"cat", "golden retriever"} and not skipped
    source = open_splits(DataParams(source="hub", path=str(tmp_path / "a")), image_size=8)["train"]
    assert "captions of train are the classes in its column 'label'" in " ".join(source.notes)


def test_files_in_a_folder_are_loaded_as_datasets_loads_them(tmp_path):
    for split in ("train", "test"):
        (tmp_path / "a" / split).mkdir(parents=True)
        for i in range(3):
            (tmp_path / "a" / split / f"{i}.png").write_bytes(PICTURE)
        write_metadata(tmp_path / "a" / split, [{"file_name": f"{i}.png", "text": f"{split} {i}"} for i in range(3)])
    assert texts(tmp_path / "a") == ({"train"}, {"test"})


def test_pictures_in_a_column_of_another_name_are_read_and_held_out_together(tmp_path):
    rows = []
    for i in range(40):
        rows += [{"Scan": {"bytes": PICTURE, "path": f"{i}.png"}, "question": "what?", "answer": f"{i}"}] * 3
    features = {"Scan": datasets.Image(), "question": datasets.Value("string"), "answer": datasets.Value("string")}
    datasets.Dataset.from_list(rows, features=datasets.Features(features)).save_to_disk(tmp_path / "a")
    train, heldout, skipped = both(tmp_path / "a", "hub", heldout_fraction=0.3)
    assert not skipped and len(train + heldout) == 120 and all(len(s.images) == 1 for s in train + heldout)
    assert heldout and not {s.text for s in train} & {s.text for s in heldout}


def test_what_cannot_be_loaded_is_one_clear_error(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ParamError, match="data.path: 'org/name:part' is not on this machine, and the hub cannot be re"):
        both("org/name:part", "hub")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ParamError, match="'org/name' is not on this machine, and the hub cannot be reached"):
        both("org/name", "hub")
    with pytest.raises(ParamError, match="'a/b/c' is no folder, and no name of the hub; write org/name, or org/name:c"):
        both("a/b/c", "hub")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ParamError, match="empty' cannot be loaded by datasets"):
        both(tmp_path / "empty", "hub")


def test_a_data_set_is_downloaded_once_and_ranks_ask_no_network(tmp_path):
    code = f"from tests.pretend_hub import main; main({str(tmp_path)!r})"
    default, two, unnamed, *ranks, at_once = json.loads(in_fresh_python(code))
    texts = {name: [f"{name}/train {i}" for i in range(3)] for name in ("one", "two")}
    assert default[0] == texts["one"] and default[1] > 0
    assert two[0] == texts["two"] and two[1] > 0
    assert "write org/name:one for the one that the hub gives" in unnamed[0], "ranks could not tell which"
    assert ranks == [[texts["one"], 0], [texts["two"], 0]]
    assert at_once == [[], [False]], "threads that look at once do not take the network from each other"
