"""Each shape of rows that data sets are published in: the sample that comes out, and its wrong neighbors by name."""

import copy
import io
import json
import re
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from material import CLIP_MEAN, CLIP_STD, both, picture_bytes, write_metadata
from PIL import Image

from mmfsdp.kit.data import END_OF_CHUNK, IMAGE, CorruptRecord, Message, Processor, open_source
from mmfsdp.kit.data.batch import IGNORE
from mmfsdp.kit.data.rows.row_pictures import picture_name, picture_names
from mmfsdp.kit.data.rows.rows import SHAPES, check_row, has_system, has_turns, keys_not_read, sample_of, shape_of
from mmfsdp.kit.data.sources.stream import DataSlice
from mmfsdp.kit.models.build import build_model
from mmfsdp.params import DataParams, ModelParams
from tests.tiny_vlms import save_vlm
from tests.tiny_vlms import tokenizer as letters

TABLE = yaml.safe_load((Path(__file__).parents[1] / "files" / "row_shapes.yaml").read_text())
WRONG = [(entry, wrong) for entry in TABLE for wrong in entry.get("wrong", [])]


def read(row: dict):
    """Return the sample of a row, and the names of its pictures; their sizes tell which is which."""
    names: list[str] = []

    def find(name: str) -> bytes:
        names.append(name)
        return picture_bytes(size=(30 + len(names), 30))

    sample = sample_of(check_row(row, name="x"), DataParams(), name="x", find=find)
    assert [image.width for image in sample.images] == [31 + i for i in range(len(names))]
    return sample, names


@pytest.mark.parametrize("entry", TABLE, ids=lambda entry: entry["name"])
def test_a_row_becomes_its_sample(entry):
    row = copy.deepcopy(entry["row"])
    sample, names = read(row)
    messages = [Message(role, text) for role, text in entry["messages"]]
    messages[-1] = Message(messages[-1].role, messages[-1].text, tuple(entry.get("answers", ())))
    assert sample.messages == tuple(messages)
    assert names == entry["pictures"]
    assert set(names) <= set(picture_names(row)), "also names the pictures that a document leaves out"
    assert sample.verbatim == entry.get("verbatim", False)
    assert keys_not_read(row) == set(entry.get("unread", []))
    assert has_turns(row) == bool(sample.more)
    assert has_system(row) == bool(sample.system)
    assert row == entry["row"], "a row is only read"


@pytest.mark.parametrize(("entry", "wrong"), WRONG, ids=lambda part: part.get("name") or part["words"])
def test_a_wrong_neighbor_is_refused_by_name(entry, wrong):
    row = {key: value for key, value in (entry["row"] | wrong["change"]).items() if value is not None}
    with pytest.raises(CorruptRecord) as error:
        read(row)
    assert wrong["words"] in error.value.reason
    for ask in (keys_not_read, has_turns, has_system, picture_names, picture_name):
        ask(row)  # before it is read, of rows of any kind


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.words)
def test_the_example_of_a_shape_is_of_it(shape):
    row = json.loads(shape.example)
    assert shape_of(row) is shape
    sample, names = read(row)
    assert names == ["cat.png"] and sample.images and not keys_not_read(row)


def test_the_page_shows_a_row_of_each_shape_that_can_be_read():
    page = (Path(__file__).parents[2] / "notebooks" / "reference" / "data.md").read_text()
    rows = re.findall(r"^\| .* \| `(\{.*\})` \|$", page, flags=re.MULTILINE)
    samples = [read(json.loads(row))[0] for row in rows]
    assert len(samples) == len(SHAPES) and all(len(sample.images) == 1 for sample in samples)


WORDS = st.text("ab cd?", min_size=1, max_size=8).map(str.strip).filter(bool)
CONVERSATIONS = st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3)


def in_all_shapes(system: str, turns: list[tuple[str, str]], pictures: list[str]) -> dict[str, dict]:
    """Return rows of one conversation with its pictures in front, in every shape that can hold it."""
    (first, answer), *more = turns
    first_text = "<image>" * len(pictures) + "\n" + first if pictures else first
    placed = [(first_text, answer), *more]
    said = [(role, text) for turn in placed for role, text in zip(("user", "assistant"), turn, strict=True)]
    plain = [(role, text) for turn in turns for role, text in zip(("user", "assistant"), turn, strict=True)]
    if system:
        said, plain = [("system", system), *said], [("system", system), *plain]
    parts = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in plain]
    user = parts[1 if system else 0]
    user["content"] = [{"type": "image", "image": name} for name in pictures] + user["content"]
    last_question, last_answer = turns[-1]
    history = [list(turn) for turn in turns[:-1]]
    beside = {"system": system or None, "images": pictures}
    questions, answers = zip(*turns, strict=True)
    return {
        "messages": {"messages": [{"role": role, "content": text} for role, text in said], "images": pictures},
        "in front": {"messages": [{"role": role, "content": text} for role, text in plain], "images": pictures},
        "parts": {"messages": parts},
        "llava": {"conversations": [{"from": role, "value": text} for role, text in said], "images": pictures},
        "role": {"conversations": [{"role": role, "content": text} for role, text in plain], "images": pictures},
        "texts": {"texts": [{"user": question, "assistant": answer} for question, answer in turns]} | beside,
        "query": {"query": last_question, "response": last_answer, "history": history} | beside,
        "alpaca": {"instruction": last_question, "output": last_answer, "history": history} | beside,
        "lists": {"questions": list(questions), "answers": list(answers)} | beside,
    }


@given(st.sampled_from(["", "be short"]), CONVERSATIONS, st.integers(0, 2))
def test_one_conversation_is_one_sample_in_any_shape(system, turns, count):
    pictures = [f"{i}.png" for i in range(count)]
    rows = in_all_shapes(system, turns, pictures)
    samples = {name: read(row) for name, row in rows.items()}
    expected = samples["messages"][0].messages
    for name, (sample, names) in samples.items():
        assert sample.messages == expected, name
        assert names == pictures, name


def learned(processor, sample) -> str:
    """Return the words that carry loss, as the tokenizer spells them."""
    batch = processor([sample])
    assert not batch.skipped and not batch.truncated
    row = batch.labels[-1]  # a blank picture stands in a row before
    return processor.tokenizer.decode(row[row != IGNORE])


@pytest.fixture(scope="module")
def plain() -> Processor:
    """Return the processor of models without a chat template, with a token for each letter."""
    return Processor(letters(), 16, CLIP_MEAN, CLIP_STD, max_length=1000)


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """Return the processor of a model of transformers, by its chat template."""
    folder = save_vlm("llava", tmp_path_factory.mktemp("vlm"))
    _, processor = build_model(ModelParams(kind="transformers", name=str(folder)), meta=True)
    return replace(processor, max_length=1000)


@pytest.mark.parametrize("entry", TABLE, ids=lambda entry: entry["name"])
def test_only_the_words_of_the_assistant_are_learned(entry, plain, chat):
    sample, _ = read(entry["row"])
    roles = [role for role, _ in entry["messages"]]
    answers = [text for role, text in entry["messages"] if role == "assistant"]
    if "user" in roles:
        assert learned(plain, sample) == "".join(f"{answer}{END_OF_CHUNK}" for answer in answers)
        assert learned(chat, sample) == "".join(f" {answer.strip()}<end>" for answer in answers)
        return
    # A document is learned from its first picture on, and its other pictures carry no loss.
    text = answers[0].partition(IMAGE)[2].replace(IMAGE, "")
    assert learned(plain, sample) == text + END_OF_CHUNK


@given(st.sampled_from(["", "be short"]), CONVERSATIONS, st.integers(0, 2))
def test_of_any_conversation_only_the_words_of_the_assistant_are_learned(plain, chat, system, turns, count):
    sample, _ = read(in_all_shapes(system, turns, [f"{i}.png" for i in range(count)])["parts"])
    assert learned(plain, sample) == "".join(f"{answer}{END_OF_CHUNK}" for _, answer in turns)
    assert learned(chat, sample) == "".join(f" {answer}<end>" for _, answer in turns)


def test_a_picture_is_a_name_bytes_a_dict_of_both_or_of_pil(tmp_path):
    """As JSON, Parquet files, data sets with decoding off, and a person's own reader have it."""
    content = picture_bytes("red", (12, 10))
    (tmp_path / "0.png").write_bytes(content)
    pictures = [
        "0.png",
        Path("0.png"),
        content,
        bytearray(content),
        {"bytes": content, "path": None},
        {"bytes": content, "path": "gone.png"},
        {"bytes": None, "path": "0.png"},
        Image.open(io.BytesIO(content)),
    ]
    for picture in pictures:
        for row in (
            {"image": picture, "text": "a dog"},
            {"images": [picture], "texts": [{"user": "what", "assistant": "a dog"}]},
            {"messages": [{"role": "user", "content": [{"type": "image", "image": picture}]}, ANSWER]},
        ):
            row = check_row(row, name="x")
            sample = sample_of(row, DataParams(), name="x", find=lambda name: tmp_path / name)
            assert sample.images[0].tobytes() == Image.new("RGB", (12, 10), "red").tobytes()
    assert picture_name({"image": {"bytes": content, "path": "0.png"}, "text": "a dog"}) == ""
    assert picture_name({"image": {"bytes": None, "path": "0.png"}, "text": "a dog"}) == "0.png"


ANSWER = {"role": "assistant", "content": "a dog"}


def test_a_picture_of_pil_is_made_upright_and_may_be_too_large_or_damaged():
    turned = Image.new("RGB", (12, 10), "red")
    turned.getexif()[0x0112] = 6  # orientation: to be turned by 90 degrees
    upright = sample_of({"image": turned, "text": "a dog"}, DataParams(), name="x", find=lambda _: b"")
    assert upright.images[0].size == (10, 12)
    with pytest.raises(CorruptRecord, match="0.012 megapixels, more than max_megapixels 0.01; raise"):
        row = {"image": Image.new("L", (120, 100)), "text": "a dog"}
        sample_of(row, DataParams(max_megapixels=0.01), name="x", find=lambda _: b"")
    cut = Image.open(io.BytesIO(picture_bytes("red", (120, 100), kind="JPEG")[:-100]))
    with pytest.raises(CorruptRecord, match="is not a usable picture"):
        read({"image": cut, "text": "a dog"})


def test_rows_with_bytes_and_objects_are_checked_for_texts_alone():
    row = {"image": b"\xff\x00", "mask": Image.new("L", (2, 2)), "text": "a dog"}
    assert check_row(row, name="x") is row
    with pytest.raises(CorruptRecord, match="an unpaired surrogate"):
        check_row({"image": b"", "text": "\ud800"}, name="x")
    with pytest.raises(CorruptRecord, match="a key that is no text"):
        check_row({7: "a dog"}, name="x")
    with pytest.raises(CorruptRecord, match="is no row of names and values"):
        check_row({("a", "b"): "a dog"}, name="x")


def test_rows_about_one_picture_have_its_name_to_be_held_out_together():
    answer = {"question": "what", "answer": "a dog"}
    assert picture_name(answer | {"image": " 0.png "}) == "0.png"
    assert picture_name(answer | {"images": ["0.png"]}) == "0.png"
    assert picture_name(answer | {"images": ["0.png", "1.png"]}) == ""
    assert picture_name(answer) == ""
    parts = [{"type": "image", "image": "0.png"}, {"type": "text", "text": "what"}]
    assert picture_name({"messages": [{"role": "user", "content": parts}, ANSWER]}) == "0.png"
    assert picture_name({"messages": [{"role": "user", "content": parts + parts}, ANSWER]}) == ""


def test_a_row_of_a_shard_in_any_shape_takes_the_picture_beside_it(shard):
    rows = {
        "a": {"question": "what", "answer": "a dog"},
        "b": {"messages": [{"role": "user", "content": "what"}, ANSWER], "image": "1000.png"},
        "c": {"texts": [{"user": "what", "assistant": "a dog"}]},
        "d": {"conversations": [{"from": "human", "value": "<image>what"}, {"from": "gpt", "value": "a dog"}]},
    }
    members = {}
    for key, row in rows.items():
        members |= {f"{key}.png": picture_bytes(), f"{key}.json": json.dumps(row).encode()}
    train, heldout, skipped = both(shard("a.tar", members), "webdataset")
    assert not skipped
    assert {(sample.text, len(sample.images)) for sample in train + heldout} == {("a dog", 1)}
    assert len(train + heldout) == len(rows)


def test_each_epoch_of_a_source_learns_the_next_caption(tmp_path, shard):
    captions = ["a dog", "a pet", "a red dog"]
    members = {}
    for i in range(2):
        (tmp_path / f"{i}.png").write_bytes(picture_bytes())
        members |= {f"{i}.png": picture_bytes(), f"{i}.json": json.dumps({"captions": captions}).encode()}
    write_metadata(tmp_path, [{"file_name": f"{i}.png", "captions": captions} for i in range(2)])
    for source, path in {"folder": tmp_path, "webdataset": shard("a.tar", members)}.items():
        train = open_source(DataParams(source=source, path=str(path)), image_size=8)
        batches = islice(train.batches(DataSlice(batch_size=1)), 4)
        assert [batch[0].text for batch in batches] == [*captions, "a dog"]
        assert [sample.truths for sample in train] == [tuple(captions)]


KEYS = sorted(
    {key for entry in TABLE for key in entry["row"]} | {"role", "content", "from", "value", "type", "url", "bytes"}
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 3) | st.floats(0, 1) | st.text("a<image>[] \n", max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*KEYS, "user", "text"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@st.composite
def changed_rows(draw) -> dict:
    """Draw a row of the table in which one value, at any depth, is another one or is missing."""
    row = copy.deepcopy(draw(st.sampled_from(TABLE))["row"])
    inner, depth = row, draw(st.integers(0, 3))
    while True:
        places = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
        if not places:
            return row
        place = draw(st.sampled_from(places))
        if depth == 0 or not isinstance(inner[place], (dict, list)):
            break
        inner, depth = inner[place], depth - 1
    if draw(st.booleans()):
        inner[place] = draw(VALUES)
    else:
        del inner[place]
    return row


@given(changed_rows() | st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4))
def test_any_row_is_a_sample_or_is_refused_by_name(row):
    for ask in (keys_not_read, has_turns, has_system, picture_names, picture_name):
        ask(row)
    try:
        sample, names = read(row)
    except CorruptRecord as error:
        assert error.name == "x" and error.reason
        return
    assert set(names) <= set(picture_names(row))
    places = "".join(message.text for message in sample.messages).count(IMAGE)
    assert places == len(sample.images) or sample.is_document
