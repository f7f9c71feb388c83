"""Conversations, COCO captions and interleaved documents: what becomes of them, and what is skipped and why."""

import base64
import json
from itertools import islice

import pytest
from material import CLIP_MEAN, CLIP_STD, PHOTOGRAPHS, both, captions, make_tokenizer, picture_bytes, write_metadata

from mmfsdp.kit.data import END_OF_CHUNK, IMAGE, CorruptRecord, Processor, batches
from mmfsdp.kit.data.batch import IGNORE
from mmfsdp.kit.data.rows.rows import sample_of
from mmfsdp.params import DataParams, ParamError

FILES = list(captions())
EOC = END_OF_CHUNK


def turns(*said: str) -> list[dict]:
    return [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(said)]


def chat(number: int, *said: str, **fields) -> dict:
    return {"id": f"c{number}", "conversations": turns(*said), **fields}


def document(texts: list[str], *pictures: tuple[int, float], **fields) -> dict:
    infos = [
        {"matched_text_index": i, "matched_sim": sim, "image_name": f"{n}.jpg"} for n, (i, sim) in enumerate(pictures)
    ]
    return {"text_list": texts, "image_info": infos, **fields}


def every(path, source="json", **changes) -> tuple[dict, dict[str, str]]:
    """Both splits' samples by name, and what was skipped."""
    train, heldout, skipped = both(path, source, **changes)
    return {s.name: s for s in train + heldout}, skipped


def learned(processor: Processor, sample) -> str:
    row = processor.encode(sample)
    return processor.tokenizer.decode([label for label in row.labels if label != IGNORE]).replace(f" {EOC}", EOC)


@pytest.fixture
def processor() -> Processor:
    return Processor(make_tokenizer("USER ASSISTANT what is it one two three four five"), 16, CLIP_MEAN, CLIP_STD)


@pytest.fixture
def pictures(tmp_path):
    """0.jpg to 3.jpg, and a writer of JSON beside them."""
    for n in range(4):
        (tmp_path / f"{n}.jpg").write_bytes((PHOTOGRAPHS / FILES[n]).read_bytes())

    def write(name: str, value) -> str:
        text = value if isinstance(value, str) else json.dumps(value)
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_conversations_learn_every_answer_and_no_question(pictures, processor):
    rows = [
        chat(0, f"{IMAGE}\nwhat is it", "one", "what", "two three", image="0.jpg"),
        chat(1, "what", "four"),
        chat(2, f"{IMAGE} {IMAGE} what", "five", image=["1.jpg", "2.jpg"]),
        {"conversations": [{"from": "gpt", "value": "hello"}, *turns("what", "one")]},
    ]
    samples, skipped = every(pictures("chats.json", rows))
    assert not skipped and set(samples) == {"chats.json:c0", "chats.json:c1", "chats.json:c2", "chats.json:3"}
    said = [learned(processor, samples[f"chats.json:{i}"]) for i in ("c0", "c1", "c2", "3")]
    assert said == [f"one{EOC} two three{EOC}", f"four{EOC}", f"five{EOC}", f"one{EOC}"]
    assert [len(sample.images) for sample in samples.values()].count(0) == 2
    prompt = processor.prompts([samples["chats.json:c0"]])
    row = processor([samples["chats.json:c0"]])
    assert (row.input_ids[0, : prompt.input_ids.shape[1]] == prompt.input_ids[0]).all()
    lines, _ = every(pictures("chats.jsonl", "\n".join(map(json.dumps, rows))))
    assert sorted(s.text for s in lines.values()) == sorted(s.text for s in samples.values())


def test_conversations_that_cannot_be_used_are_skipped_by_name(pictures):
    good = [chat(i, f"{IMAGE} what", "one", image=f"{i}.jpg") for i in (0, 1)]
    bad = [
        (chat(2, "what", "one", "two"), "has turns of user, assistant, user; they must be"),
        (chat(3), "has turns of nobody; they must be"),
        (chat(4, "what", "one", image=7), "has a wrong image"),
        (chat(5, f"{IMAGE} what", "one", image="none.jpg"), "FileNotFoundError"),
        (chat(6, f"{IMAGE} what", "one", image="../../etc/hostname"), "leads out of the folder"),
        ({"id": "c7", "conversations": "hello"}, "has a wrong conversations: it should be a list"),
        ({"id": "c8", "conversations": turns("what", "one")[::-1]}, "has turns of user"),
        (
            {"id": "c9", "conversations": [{"from": "human"}, {"from": "gpt", "value": 3}]},
            "conversations.0.value",
        ),
        ("text", "is not a JSON object"),
        ({"id": "c11"}, "has no file_name"),
        (chat(12, f"{IMAGE} what", "one"), "names no picture under 'image'"),
    ]
    _, skipped = every(pictures("chats.json", [*good, *(row for row, _ in bad)]))
    for i, (row, why) in enumerate(bad, start=2):
        name = f"{row['id']} (row {i})" if isinstance(row, dict) else i
        assert why in skipped.pop(f"chats.json:{name}"), i
    assert not skipped
    for row, words in [
        (chat(0, f"{IMAGE} {IMAGE} what", "one", image="0.jpg"), "2 <image> placeholders but 1 pictures"),
        (chat(0, "what", "one", image="0.jpg"), "0 <image> placeholders but 1 pictures"),
        (chat(0, f"{IMAGE} what", " \n", image="0.jpg"), "has an answer without text"),
    ]:
        with pytest.raises(CorruptRecord, match=words):
            sample_of(row, DataParams(), name="x", find=lambda _: picture_bytes())


def test_coco_captions_are_held_out_by_picture(tmp_path):
    texts = list(captions().values())
    coco = {
        "images": [{"id": 10 + i, "file_name": file} for i, file in enumerate(FILES)],
        "annotations": [
            {"id": 5 * i + k, "image_id": 10 + i, "caption": f"{text} {k}"}
            for i, text in enumerate(texts)
            for k in range(5)
        ]
        + [{"id": 90, "image_id": 99, "caption": "of nothing"}, {"id": 91, "image_id": 10}],
        "info": {},
    }
    path = tmp_path / "captions.json"
    path.write_text(json.dumps(coco))
    *samples, skipped = both(path, "json", pictures=str(PHOTOGRAPHS), heldout_fraction=0.4)
    assert {s.text for part in samples for s in part} == {f"{text} {k}" for text in texts for k in range(5)}
    sides = [{s.text[:-2] for s in part} for part in samples]
    assert all(sides) and not sides[0] & sides[1]
    last = 5 * len(FILES)
    assert "has no file_name" in skipped[f"captions.json:90 (row {last})"]
    assert "has no caption" in skipped[f"captions.json:91 (row {last + 1})"]


def test_documents_put_each_picture_before_the_sentence_that_it_matches(processor):
    row = document(["one", "two", "three", "four", "five"], (3, 0.3), (1, 0.31), (2, 0.1), (3, 0.5))
    sample = sample_of(row, DataParams(), name="d", find=lambda file: picture_bytes(size=(int(file[0]) + 1, 1)))
    assert sample.prompt + sample.text == f"one {IMAGE}two three{EOC}{IMAGE}{IMAGE}four five"
    assert [image.size[0] for image in sample.images] == [2, 1, 4]
    assert learned(processor, sample) == f"two three{EOC} four five{EOC}"
    few = sample_of(row, DataParams(max_pictures=1), name="d", find=lambda _: picture_bytes())
    assert few.text == "two three four five" and len(few.images) == 1
    all_of_them = sample_of(row, DataParams(min_similarity=0.0), name="d", find=lambda _: picture_bytes())
    assert all_of_them.text.count(IMAGE) == 3 and len(all_of_them.images) == 4


def test_documents_in_lines_and_in_shards_with_pictures_inside_or_beside(pictures, shard, tmp_path):
    data = {n: (tmp_path / f"{n}.jpg").read_bytes() for n in range(4)}
    texts = ["one", "two", "three"]
    beside = [document([*texts, str(n)], (0, 0.3), (2, 0.4)) for n in range(3)]
    inside = [json.loads(json.dumps(row)) for row in beside]
    for row in inside:
        for n, info in enumerate(row["image_info"]):
            del info["image_name"]
            info["image_base64"] = base64.b64encode(data[n]).decode()
    members = {f"d{i}.json": json.dumps(row).encode() for i, row in enumerate(inside)}
    within = {}
    for i, row in enumerate(beside):
        within |= {f"e{i}.json": json.dumps(row).encode(), f"e{i}.0.jpg": data[0], f"e{i}.1.jpg": data[1]}
    found = [
        every(pictures("beside.jsonl", "\n".join(map(json.dumps, beside)))),
        every(pictures("inside.jsonl", "\n".join(map(json.dumps, inside)))),
        every(shard("inside.tar", members), "webdataset"),
        every(shard("within.tar", within), "webdataset"),
    ]
    seen = [
        sorted((s.prompt, s.text, *(i.tobytes() for i in s.images)) for s in samples.values()) for samples, _ in found
    ]
    assert all(one == seen[0] for one in seen) and len(seen[0]) == 3 and not any(skipped for _, skipped in found)
    assert seen[0][0][:2] == (IMAGE, f"one two{EOC}{IMAGE}three 0")


def test_documents_that_cannot_be_used_are_skipped_by_name(pictures, shard):
    good = {"matched_text_index": 0}
    bad = [
        (document(["three"], (0, 0.1)), "no picture that matches its text by min_similarity 0.24"),
        (document(["four"]), "no picture that matches"),
        (document(["five"], (1, 0.3)), "matched_text_index 1, beyond its text_list"),
        (document("six", (0, 0.3)), "has a wrong text_list"),
        ({"text_list": ["seven"]}, "has a wrong image_info: Field required"),
        ({"text_list": ["nine"], "image_info": [good | {"image_base64": "no base64!"}]}, "is not a usable picture"),
        ({"text_list": ["ten"], "image_info": [good | {"image_base64": "AAAA"}]}, "is not a usable picture"),
        ({"text_list": ["eleven"], "image_info": [good | {"matched_sim": "high"}]}, "a wrong image_info.0.matched_sim"),
        ({"text_list": ["half a letter: \ud800"], "image_info": [good]}, "an unpaired surrogate"),
    ]
    rows = [document(["one"], (0, 0.3)), document(["two"], (0, 0.3)), *(row for row, _ in bad)]
    _, skipped = every(pictures("docs.jsonl", "\n".join([*map(json.dumps, rows), '{"text_list": ['])))
    for line, why in enumerate([*(why for _, why in bad), "is not JSON"], start=3):
        assert why in skipped.pop(f"docs.jsonl:{line}"), line
    assert not skipped
    tar = shard("docs.tar", {f"{i}.json": json.dumps(document(["a"], (0, 1))).encode() for i in range(2)})
    with pytest.raises(ParamError, match="names '0.jpg', which is not in its shard; pack it as "):
        every(tar, "webdataset")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("x.json", "{'a': 1}", "is not JSON .*JSON lines must be in a .jsonl file"),
        ("x.json", '{"a": 1}', "neither a list of rows nor COCO"),
        ("x.json", '{"images": [{}], "annotations": []}', "is not as COCO's"),
        ("x.json", "[", "is not JSON"),
        ("x.json", "[]", "0 usable records"),
        ("x.jsonl", "", "0 usable records"),
    ],
)
def test_files_that_are_something_else_are_errors_naming_them(pictures, name, text, words):
    with pytest.raises(ParamError, match=words) as error:
        every(pictures(name, text))
    assert error.value.field == "data.path" and "x.json" in str(error.value)


def test_several_files_are_one_source_and_lines_may_hold_any_letter(pictures, tmp_path):
    for i in range(2):
        (tmp_path / f"part{i}").mkdir()
        (tmp_path / f"part{i}" / "0.jpg").write_bytes((tmp_path / "0.jpg").read_bytes())
        row = {"file_name": "0.jpg", "text": f"text\u2028{i}"}
        (tmp_path / f"part{i}" / "rows.jsonl").write_text("\ufeff" + json.dumps(row, ensure_ascii=False) + "\n\n")
    samples, skipped = every(tmp_path / "part{0..1}" / "rows.jsonl")
    assert {name: s.text for name, s in samples.items()} == {f"part{i}/0.jpg": f"text\u2028{i}" for i in range(2)}
    assert not skipped
    (tmp_path / "part0" / "rows.jsonl").unlink()
    with pytest.raises(ParamError, match="part0/rows.jsonl of 2 not found"):
        every(tmp_path / "part{0..1}" / "rows.jsonl")


def test_resampling_draws_with_replacement_and_restarts_exactly(tmp_path, shard, processor):
    for i in range(20):
        (tmp_path / f"{i}.png").write_bytes(picture_bytes())
        shard(f"s{i:02d}.tar", {"a.png": picture_bytes(), "a.txt": f"{i}".encode()})
    write_metadata(tmp_path, [{"file_name": f"{i}.png", "text": f"{i}"} for i in range(20)])
    processor = Processor(make_tokenizer(" ".join(map(str, range(20)))), 16, CLIP_MEAN, CLIP_STD)
    for source, path in {"folder": tmp_path, "webdataset": tmp_path}.items():
        params = DataParams(source=source, path=str(path), resample=True, heldout_fraction=0.05)

        def heard(count: int, start: int = 0, params=params) -> list[str]:
            stream = batches(params, processor, batch_size=1, start=start)
            return [processor.decode(batch.input_ids)[0] for batch in islice(stream, count)]

        drawn = heard(40)
        assert len(set(drawn[:20])) < 17 and heard(20, 20) == drawn[20:] and drawn[:20] != drawn[20:]
