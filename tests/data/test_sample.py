"""The inner form of a sample: messages with pictures, and what each processor makes of them."""

from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from material import CLIP_MEAN, CLIP_STD, make_tokenizer
from PIL import Image

from mmfsdp.kit.data import IMAGE, CorruptRecord, Message, Processor, Sample
from mmfsdp.kit.data.batch import QUESTION
from mmfsdp.kit.data.sources.stream import DataSlice, IndexedSource
from mmfsdp.kit.models.build import build_model
from mmfsdp.kit.train.evaluate import exact_match
from mmfsdp.params import ModelParams
from tests.tiny_vlms import save_vlm

RED = Image.new("RGB", (56, 56), "red")
PIRATE = Message("system", "You are a pirate")
ASKS = Message("user", f"{IMAGE} what is it")
DOG = Message("assistant", "a dog", ("a puppy", "a dog", "pet"))


@pytest.mark.parametrize(
    "roles",
    [
        [],
        ["user"],
        ["system"],
        ["system", "user"],
        ["user", "user", "assistant"],
        ["user", "assistant", "system"],
        ["assistant", "user"],
        ["assistant", "assistant"],
        ["user", "tool"],
        ["human", "gpt"],
    ],
)
def test_messages_in_another_order_or_of_other_roles_are_refused(roles):
    with pytest.raises(ValueError, match=f"sample 'x' has the roles {', '.join(roles) or 'of none'}; it needs user"):
        Sample(tuple(Message(role, "words") for role in roles), name="x")


TEXTS = st.text("ab \n:USER", max_size=9)
PROMPTS = TEXTS | TEXTS.map(QUESTION.format)


@given(st.lists(st.tuples(PROMPTS, TEXTS), min_size=1, max_size=3))
def test_a_sample_of_prompts_and_texts_keeps_each_word_by_word(turns):
    (prompt, text), *more = turns
    sample = Sample.of(prompt, text, name="x", more=more, where="row 3")
    assert (sample.prompt, sample.text, sample.more) == (prompt, text, tuple(more))
    assert sample.label == "x (row 3)"


def test_a_question_has_its_frame_only_where_no_chat_template_writes_one():
    sample = Sample((ASKS, DOG, Message("user", "and"), Message("assistant", "a cat")), (RED,))
    assert sample.prompt == f"USER: {IMAGE} what is it\nASSISTANT:\n" and sample.text == "a dog"
    assert sample.more == (("USER: and\nASSISTANT:\n", "a cat"),)
    assert sample.questions == [(f"{IMAGE} what is it", "a dog"), ("and", "a cat")]
    assert Sample.of(*sample.turns[0], images=(RED,), more=sample.more).questions == sample.questions


def test_a_document_is_given_up_to_its_first_picture():
    document = Sample((Message("assistant", f"one {IMAGE} two {IMAGE} three"),), (RED, RED))
    assert (document.prompt, document.text) == (f"one {IMAGE}", f" two {IMAGE} three")
    assert Sample((Message("assistant", "words"),)).turns == [("", "words")]


def test_a_system_text_stands_first_without_loss():
    processor = Processor(make_tokenizer("You are a pirate USER : ASSISTANT what is it dog"), 8, CLIP_MEAN, CLIP_STD)
    sample = Sample((PIRATE, ASKS, DOG), (RED,))
    batch = processor([sample])
    words = processor.tokenizer.convert_ids_to_tokens(batch.input_ids[0].tolist())
    assert " ".join(words).startswith(f"You are a pirate USER : {IMAGE} what")
    learned = batch.labels[batch.labels != -100].tolist()
    assert processor.decode(batch.labels[:, -3:]) == ["a dog"] and len(learned) == 3
    prompt = processor.prompts([sample]).input_ids[0]
    assert prompt.equal(batch.input_ids[0, : len(prompt)])


SYSTEM_TURN = "{% if m.role == 'system' %}<sys>{{ m.content[0].text }}</sys>{% else %}"
TEMPLATE = (
    "{% for m in messages %}SYSTEM<m>{% for part in m.content %}{% if part.type == 'image' %}<image>{% else %}"
    "{{ part.text }}{% endif %}{% endfor %}</m>{% endif %}{% endfor %}{% if add_generation_prompt %}<m>{% endif %}"
)


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """Return a real processor of LLaVA with a chat template."""
    folder = save_vlm("llava", tmp_path_factory.mktemp("vlm"))
    _, processor = build_model(ModelParams(kind="transformers", name=str(folder)), meta=True)

    def with_template(template: str):
        processor.processor.chat_template = template
        return replace(processor, max_length=400)

    return with_template


def test_a_system_text_is_the_templates_system_message(chat):
    sample = Sample((PIRATE, ASKS, DOG, Message("user", "and"), Message("assistant", "a cat")), (RED,), "x")
    processor = chat(TEMPLATE.replace("SYSTEM", SYSTEM_TURN))
    encoded = processor.encode(sample)
    assert encoded.text.startswith("<sys>You are a pirate</sys><m><image>what is it</m>")
    assert [encoded.text[start:end] for start, end in encoded.answers] == ["a dog</m>", "a cat</m>"]
    batch = processor([sample])
    assert processor.tokenizer.decode(batch.labels[batch.labels != -100]) == "a dog</m>a cat</m>"
    assert "You are a pirate" in processor.tokenizer.decode(processor.prompts([sample]).input_ids[0])


@pytest.mark.parametrize(
    ("system_turn", "words"),
    [
        (
            "{% if m.role == 'system' %}{% else %}",
            "has a system text, and the chat template of .* leaves it out",
        ),
        ("{% if m.role == 'system' %}{{ m.nothing.more }}{% else %}", "fails with it .* into the first question"),
    ],
)
@pytest.mark.parametrize("mark", ["{{ part.text }}", "{% generation %}{{ part.text }}{% endgeneration %}"])
def test_a_template_without_system_text_has_the_sample_skipped(chat, system_turn, words, mark):
    processor = chat(TEMPLATE.replace("SYSTEM", system_turn).replace("{{ part.text }}", mark))
    sample = Sample((PIRATE, ASKS, DOG), (RED,), "x")
    for use in (processor.encode, lambda sample: processor.prompts([sample])):
        with pytest.raises(CorruptRecord, match=words):
            use(sample)
    assert processor.encode(replace(sample, messages=sample.messages[1:])).answers


def test_each_epoch_learns_the_next_right_answer():
    sample = Sample((ASKS, DOG), (RED,), "x")
    source = IndexedSource(lambda index: replace(sample, name=str(index)), length=3)
    batches = list(islice(source.batches(DataSlice(batch_size=1)), 15))
    texts = [batch[0].text for batch in batches]
    assert texts == [text for text in ("a dog", "a puppy", "a dog", "pet", "a dog") for _ in range(3)]
    assert all(sorted(batch[0].truths) == sorted(sample.truths) for batch in batches)
    restarted = next(source.batches(DataSlice(batch_size=1, start=9)))
    assert (restarted[0].text, restarted[0].name) == ("pet", batches[9][0].name)
    assert {loaded.text for loaded in source.loaded()} == {"a dog"}


def test_any_right_answer_is_a_match():
    sample = Sample((ASKS, DOG), (RED,))
    assert exact_match(["pet", "a dog", "a cat", "a puppy"], [sample] * 4) == 0.75
