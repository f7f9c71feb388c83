"""Content that is not read is refused by name; other keys that nobody reads are named once for a source."""

import base64
import json

import pytest
from material import both, picture_bytes, write_metadata
from PIL import Image

from mmfsdp.kit.data import IMAGE, CorruptRecord, open_source
from mmfsdp.kit.data.corrupt import label_of, shorten
from mmfsdp.kit.data.rows.rows import SHAPES, keys_not_read, sample_of
from mmfsdp.params import DataParams, ParamError


def chat(question: str = "what is it", answer: str = "a dog", **fields) -> dict:
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {"conversations": turns, **fields}


def with_turn_key(**fields) -> dict:
    row = chat()
    row["conversations"][1] |= fields
    return row


PICTURE = {"file_name": "0.png", "text": "a dog"}
CONTENT = {
    "video": chat("<video>\nwhat is it", video="a.mp4"),
    "audios": chat(audios=["a.wav"]),
    "video_path": PICTURE | {"video_path": "clips/a.mp4"},
    "sound_file": PICTURE | {"sound_file": "a.flac"},
    "Video": chat(Video="a.mp4"),
    "system_prompt": PICTURE | {"system_prompt": "You are a pirate."},
    "tools": chat(tools=[{"name": "search"}]),
    "history": chat(history=[["hello", "hello"]]),
    "rejected_response": chat(rejected_response="a cat"),
    "image_url": chat(image_url="https://example.org/0.png"),
    "image_id": chat(image_id=7),
    "picture_base64": chat(picture_base64="AAAA"),
    "question": PICTURE | {"question": "what is it"},
    "prompt": PICTURE | {"prompt": "what is it"},
    "chosen": chat(chosen="a dog", rejected="a cat"),
    "weight": with_turn_key(weight=0),
    "loss": with_turn_key(loss=False),
    "tool_calls": with_turn_key(tool_calls=[{"name": "search"}]),
    "image": with_turn_key(image="0.png"),
}
TAGS = ["<|vision_start|>", "<IMG_CONTEXT>", "<start_of_image>", "<image_soft_token>", "<|media_pad|>", "<|AUDIO|>"]
TAGS += ["<global-img>", "<|START_OF_IMG|>", "<fake_token_around_image>", "<|begin_of_video|>", "<|audio_bos|>"]
TAGS += [
    "<video>",
    "<audio>",
    "<img>0.png</img>",
    "<image_1>",
    "<image 2>",
    "<ImageHere>",
    "<|video_pad|>",
    "<|image|>",
]


def read(row: dict):
    return sample_of(row, DataParams(), name="x", find=lambda _: picture_bytes())


@pytest.mark.parametrize("key", CONTENT)
def test_a_key_of_content_that_is_not_read_is_refused_by_its_name(key):
    with pytest.raises(CorruptRecord, match=f"'{key}'"):
        read(CONTENT[key])


@pytest.mark.parametrize("tag", TAGS)
def test_a_tag_of_content_that_is_not_read_is_refused_by_its_name(tag):
    name = tag.partition(">")[0] + ">"
    for row in (chat(f"{tag}\nwhat is it"), chat(answer=f"see {tag}"), {**PICTURE, "text": f"a {tag}"}):
        with pytest.raises(CorruptRecord) as error:
            read(row)
        assert f"has {name} in its text" in error.value.reason
    later = chat()
    later["conversations"] += chat(f"and {tag}")["conversations"]
    with pytest.raises(CorruptRecord, match="in its text"):
        read(later)


def test_keys_without_content_and_words_in_brackets_are_no_reason_to_refuse_a_row():
    row = chat("is <b>this</b> <videos> or <image-map>", system="", tools=[], video=None, image=None, images=[])
    assert read(row).text == "a dog"
    assert read(with_turn_key(weight=1, loss=True)).text == "a dog"
    assert len(read(PICTURE | {"image_url": "https://example.org/0.png", "video_id": "7"}).images) == 1


ASKED = {"question": "what is it", "answer": "a dog"}
EMBEDDED = {
    "bytes": picture_bytes(),
    "jpeg": picture_bytes(kind="JPEG"),
    "gif": picture_bytes(kind="GIF"),
    "webp": picture_bytes(kind="WEBP"),
    "bmp": picture_bytes(kind="BMP"),
    "tiff": picture_bytes(kind="TIFF"),
    "dict": {"bytes": picture_bytes(), "path": None},
    "pil": Image.new("RGB", (8, 8)),
}
BASE64 = base64.b64encode(picture_bytes(size=(99, 99))).decode()


@pytest.mark.parametrize("kind", EMBEDDED)
def test_a_column_of_any_name_that_holds_pictures_is_read(kind):
    picture = EMBEDDED[kind]
    for row in (ASKED, {"caption": "a dog"}, {"messages": chat_messages()}):
        for value in (picture, [picture]):
            sample = read(row | {"Scan of page": value, "author": "somebody"})
            assert len(sample.images) == 1 and IMAGE in sample.prompt
    assert len(read(ASKED | {"views": [picture, None, picture][::2]}).images) == 2
    assert len(read(ASKED | {"file_name": "no/such.png", "image": picture}).images) == 1
    assert keys_not_read(ASKED | {"file_name": "no/such.png", "image": picture}) == {"file_name"}
    assert keys_not_read(ASKED | {"Scan of page": picture, "author": "somebody"}) == {"author"}


def chat_messages() -> list[dict]:
    return [{"role": "user", "content": "what is it"}, {"role": "assistant", "content": "a dog"}]


@pytest.mark.parametrize(
    ("row", "key"),
    [
        (ASKED | {"left": EMBEDDED["bytes"], "right": EMBEDDED["dict"]}, "left"),
        (ASKED | {"image": "0.png", "mask": EMBEDDED["bytes"]}, "mask"),
        (ASKED | {"image": EMBEDDED["dict"], "depth": EMBEDDED["pil"]}, "depth"),
        (ASKED | {"image": "0.png", "also": f"data:image/png;base64,{BASE64}"}, "also"),
        (ASKED | {"also": BASE64}, "also"),
        (ASKED | {"image": "0.png", "meta": {"crops": [{"shown": EMBEDDED["bytes"]}]}}, "meta"),
        (ASKED | {"meta": {"file": "0.png"}}, "meta"),
        (ASKED | {"image": "0.png", "clip": {"bytes": b"\0\0\0\x18ftypmp42", "path": None}}, "clip"),
        (ASKED | {"image": "0.png", "said": b"RIFF\0\0\0\0WAVE"}, "said"),
        (chat() | {"noise": {"array": [0.1], "sampling_rate": 8000, "path": "a.wav"}}, "noise"),
        ({"messages": [chat_messages()[0] | {"shown": EMBEDDED["dict"]}, chat_messages()[1]]}, "shown"),
        ({"texts": [{"user": "what", "assistant": "a dog", "figure": EMBEDDED["bytes"]}]}, "figure"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_pictures_videos_and_sounds_that_are_not_read_are_refused_by_their_key(row, key):
    with pytest.raises(CorruptRecord, match=f"'{key}'"):
        read(row)


def test_names_and_addresses_beside_the_picture_of_a_row_are_told():
    row = ASKED | {
        "image": EMBEDDED["dict"],
        "url": "https://example.org/0.jpg",
        "source_file": "0.jpg",
        "film": "a.mp4",
    }
    assert len(read(row).images) == 1
    assert keys_not_read(row) == {"url", "source_file", "film"}


def test_words_of_other_columns_are_no_pictures():
    row = ASKED | {"words": ["see", "photo.jpg"], "note": "the file is\na.png", "version": "1.2", "hash": "ab" * 40}
    row |= {"payload": b"\x93NUMPY", "title": "BMW", "data": b"BMW is a car", "link": "https://example.org/png"}
    assert not read(row).images
    assert keys_not_read(row) == row.keys() - ASKED.keys()


def test_a_table_writes_null_where_another_key_has_the_picture_or_the_text():
    assert read({"file_name": None, "image": "0.png", "text": None, "caption": "a dog"}).text == "a dog"
    assert len(read(chat(f"{IMAGE} what", image=None, images=["0.png"])).images) == 1
    assert len(read(chat(f"{IMAGE} what", image="0.png", images=["0.png"])).images) == 1
    with pytest.raises(CorruptRecord, match="under 'image' and others under 'images'"):
        read(chat(f"{IMAGE} what", image="0.png", images=["1.png"]))


@pytest.mark.parametrize(
    "row",
    [
        {"premise": "a dog", "hypothesis": "a pet"},
        {"text": "a dog", "label": 3},
        {"image": "0.png", "label": 3},
        {"url": "https://example.org/0.png", "caption": "a dog"},
        {},
    ],
    ids=lambda row: next(iter(row), "empty"),
)
def test_a_row_of_another_shape_says_its_keys_and_which_shapes_are_read(row):
    with pytest.raises(CorruptRecord) as error:
        read(row)
    assert all(key in error.value.reason for key in row or ["no keys"])
    for shape in SHAPES:
        assert shape.words in error.value.reason


def test_a_data_set_of_another_shape_is_an_error_that_says_so_once(tmp_path):
    rows = [{"premise": str(i)} for i in range(200)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    with pytest.raises(ParamError, match=r"200 skipped; rows.json:0 \(and 199 more\) has no file_name") as error:
        both(tmp_path / "rows.json", "json")
    assert str(error.value).count("conversations of from and value") == 1


def test_keys_that_nobody_reads_are_named_once_for_a_source(tmp_path, shard):
    for i in range(3):
        (tmp_path / f"{i}.png").write_bytes(picture_bytes())
    write_metadata(tmp_path, [{"file_name": f"{i}.png", "text": "dog", "license": i, "url": None} for i in range(3)])
    members = {}
    for i in range(3):
        caption = json.dumps({"caption": "dog", "width": 12}).encode()
        members |= {f"{i}.png": picture_bytes(), f"{i}.json": caption, f"{i}.cls": b"7"}
    sources = {"folder": tmp_path, "webdataset": shard("a.tar", members)}
    notes = {"folder": "rows have the keys license, which are not read"}
    notes["webdataset"] = "rows have the keys .cls, width, which are not read"
    for source, path in sources.items():
        params = DataParams(source=source, path=str(path))
        assert open_source(params, image_size=8).notes == [notes[source]]


def test_members_of_a_shard_with_content_that_is_not_read_are_refused_by_name(shard):
    picture = picture_bytes()
    members = {f"{i}.{kind}": data for i in range(2) for kind, data in {"png": picture, "txt": b"good"}.items()}
    members |= {"film.png": picture, "film.txt": b"a film", "film.mp4": b"film"}
    members |= {"two.png": picture, "two.jpg": picture, "two.txt": b"two"}
    members |= {"blind.png": picture, "blind.json": json.dumps(chat()).encode()}
    members |= {"iphone.heic": b"\0\0\0\x18ftypheic", "iphone.txt": b"a dog"}
    members |= {"scan.tif": picture_bytes(kind="TIFF"), "scan.txt": b"good"}
    members |= {"page.dat": picture, "page.json": json.dumps(chat()).encode()}
    members |= {"phone.heic": b"\0\0\0\x18ftypheic", "phone.json": json.dumps(chat()).encode()}
    members |= {"a.b.png": picture, "a.b.txt": b"dots", "a.c.png": picture, "a.c.txt": b"dots"}
    members |= {"link.json": json.dumps(chat(f"{IMAGE} what", image="https://example.org/0.png")).encode()}
    train, heldout, skipped = both(shard("a.tar", members), "webdataset")
    assert {sample.text for sample in train + heldout} == {"good"}
    for key, words in {
        "film": "has .mp4: of video and sound nothing is read",
        "two": "has .jpg and .png, and a caption is of one picture",
        "blind": "has 0 <image> placeholders but 1 pictures",
        "iphone": ".heic is HEIC, which is not read; convert it to JPEG",
        "page": "has .dat, which is a picture, a video or a sound, and is not read",
        "phone": "has .heic, which is a picture, a video or a sound, and is not read",
        "a": "is the key of 'a.b.png' and its text, too: a key ends at the first dot; rename its members, as a_b.png",
        "link": "names the URL 'https://example.org/0.png'; download it",
    }.items():
        assert words in skipped.pop(f"a.tar/{key}"), key
    assert not skipped


def test_long_names_that_differ_in_a_letter_stay_apart():
    """Skipped records are counted by their labels, which are cut."""
    first, second = "folder/" * 20 + "a" + "x" * 60, "folder/" * 20 + "b" + "x" * 60
    assert label_of(first, "") != label_of(second, "")
    assert max(len(label_of(first, "")), len(shorten(first))) <= 80
    assert shorten(shorten(first)) == shorten(first)
