"""Vision-language models of transformers by name: what trains, which words are learned, and what is refused."""

import json
import re
import shutil
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
import transformers
from peft import PeftModel
from PIL import Image

from mmfsdp.kit.compat.export_vlm import save_adapter
from mmfsdp.kit.data.batch import QUESTION, Sample
from mmfsdp.kit.data.corrupt import CorruptRecord
from mmfsdp.kit.models import build_vision
from mmfsdp.kit.models.backbones import is_causal
from mmfsdp.kit.models.build import build_model, freeze_model, open_model
from mmfsdp.kit.shapes.small_llava import clip_names
from mmfsdp.kit.train.prepare import prepare, preview
from mmfsdp.params import BackboneParams, ModelParams, ParamError, RunParams
from tests import families
from tests.tiny import VISION
from tests.tiny_vlms import CHAT, FAMILIES, save_vlm

CONNECTOR = {"qwen2_5_vl": "visual.merger", "qwen3_vl": "merger", "idefics3": "connector"}


def picture(width: int, height: int, color: str = "red") -> Image.Image:
    return Image.new("RGB", (width, height), color)


ONE = Sample.of("<image> what is it ?", "a red circle", (picture(56, 84),), "one")
TEXT = Sample.of(QUESTION.format("what is two ?"), "a shape", (), "text")
TURNS = Sample.of(
    "<image><image> and this ?",
    "two blue stars",
    (picture(28, 28), picture(112, 56, "blue"), picture(60, 60)),
    "turns",
    (("<image> one ?", "no"),),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("vlms")
    return {family: save_vlm(family, root / family) for family in FAMILIES}


def params(folder, **changes) -> ModelParams:
    return ModelParams(kind="transformers", name=str(folder), **changes)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_is_what_the_family_takes_and_learns_the_answers(folders, family):
    model, processor = build_model(params(folders[family]))
    processor = replace(processor, max_length=400)
    batch = processor([TEXT, ONE, TURNS])
    learned = [processor.tokenizer.decode(row[row != -100]) for row in batch.labels]
    assert sorted(learned) == [" a red circle<end>", " a shape<end>", " two blue stars<end> no<end>"]
    assert batch.size == 3 and not batch.skipped and not batch.truncated
    assert torch.isfinite(model(**batch.inputs()).loss)
    prompts = processor.prompts([ONE, TURNS])
    new = model.generate(**prompts.inputs(), do_sample=False, max_new_tokens=3)[:, prompts.input_ids.shape[1] :]
    assert len(processor.decode(new)) == 2

    alone = processor([TEXT])  # with a blank picture in a row of its own
    assert alone.size == 1 and len(alone.input_ids) == 2 and alone.label_tokens == len(" a shape") + 1
    assert alone.media.keys() == batch.media.keys()
    masked = replace(processor, mask_padding=True)([TEXT])
    ids = alone.input_ids[1:, : int(masked.attention_mask[1].sum())]
    types = {key: tensor[1:, : ids.shape[1]] for key, tensor in alone.media.items() if "type_ids" in key}
    text_only = model(input_ids=ids, labels=alone.labels[1:, : ids.shape[1]], **types).loss
    torch.testing.assert_close(model(**alone.inputs()).loss, text_only)


NOT_CAUSAL = {"blip", "git", "idefics", "paligemma"}
"""Families of which some tokens see later ones, or whose modules do not say that none does."""
ENCODER_DECODERS = {"florence2", "pix2struct", "udop", "vision-encoder-decoder"}


@pytest.mark.parametrize("name", families.thirds(sorted(families.FAMILIES.keys() - ENCODER_DECODERS), 0))
def test_a_mask_is_left_out_only_where_the_loss_is_the_same_without_it(name):
    """Bit by bit: of a batch without padding in any family, of one that is padded on the right in causal ones."""
    model = families.build(name).eval()
    assert is_causal(model.get_decoder()) == (name not in NOT_CAUSAL)
    inputs = families.Inputs(name).inputs()
    mask = inputs.pop("attention_mask")
    assert torch.equal(model(**inputs).loss, model(**inputs, attention_mask=mask).loss)
    if name not in NOT_CAUSAL:
        for tensor, padding in ((mask, 0), (inputs["labels"], -100), (inputs["input_ids"], 0)):
            tensor[1, -5:] = padding
        assert torch.equal(model(**inputs).loss, model(**inputs, attention_mask=mask).loss)


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_are_found_whatever_their_names(folders, family):
    trained = {}
    for part in ("vision", "projector", "language", "lora"):
        chosen = params(folders[family], freeze=("*", f"!{part}"), lora_rank=2)
        model, _ = build_model(chosen, meta=True)
        trained[part] = set(freeze_model(model, chosen).trainable)
    names = {name for name, _ in model.named_parameters()}
    whole = trained["vision"] | trained["projector"] | trained["language"]
    assert whole == names and trained["lora"] < trained["language"]
    assert not trained["vision"] & trained["projector"] and not trained["projector"] & trained["language"]
    connector = CONNECTOR.get(family, "multi_modal_projector")
    assert trained["projector"] == {name for name in names if connector in name or "image_newline" in name}
    assert all("lora_" in name for name in trained["lora"]) and "lm_head.weight" not in trained["lora"]


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_read_one_by_one_from_the_names_they_were_released_with(folders, family):
    loaded, _ = build_model(params(folders[family], lora_rank=2))
    _, _, weights = open_model(params(folders[family], lora_rank=2))
    tensors = dict(loaded.named_parameters()) | dict(loaded.named_buffers())
    assert all("lora_" in name for name in weights.new_parameters)
    for name in weights.sources:
        assert torch.equal(weights.read(name), tensors[name]), name


def test_lora_takes_the_matrices_that_are_named(folders):
    model, _ = build_model(params(folders["llava"], lora_rank=2, lora_targets=("q_proj",)), meta=True)
    adapters = [name for name, _ in model.named_parameters() if "lora_A" in name]
    assert len(adapters) == 2 and all("language_model" in name and "q_proj" in name for name in adapters)
    with pytest.raises(ParamError, match="lora_targets: .*'nothing'.* gives no adapters"):
        build_model(params(folders["llava"], lora_rank=2, lora_targets=("nothing",)), meta=True)


def test_what_is_too_long_is_cut_or_skipped_by_name(folders):
    _, processor = build_model(params(folders["qwen2_5_vl"]), meta=True)
    long = Sample.of(TEXT.prompt, "a " * 30, (), "text")
    length = processor([long]).input_ids.shape[1]
    short = replace(processor, max_length=40)
    wide = Sample.of("<image>" * 3 + "?", ONE.text, (picture(112, 112),) * 3, "wide")
    chatty = Sample.of("what " * 30, TEXT.text, (), "chatty")
    batch = short([long, wide, chatty])
    assert length > 40 == batch.input_ids.shape[1] and batch.truncated == 1 and batch.size == 1
    assert batch.skipped.keys() == {"wide", "chatty"}
    assert "pictures beyond the first 40" in batch.skipped["wide"] and "max_length" in batch.skipped["chatty"]
    for bad, reason in (
        (replace(ONE, images=()), "1 <image> placeholders but 0 pictures"),
        (Sample.of(ONE.prompt, " ", ONE.images), "an answer without text"),
        (Sample.of(ONE.prompt, "<image>", ONE.images), "an answer without text, or with <image>"),
        (Sample.of("what is <image> ?", "a shape", (picture(9, 9),), "text", (("<|x|>", ""),)), "an answer"),
    ):
        with pytest.raises(CorruptRecord, match=reason):
            processor.encode(bad)


def test_a_text_with_a_token_of_the_processor_for_pictures_is_refused_by_that_token(folders):
    for family, token in {"gemma3": "<boi>", "qwen2_5_vl": "<video>"}.items():
        _, processor = build_model(params(folders[family]), meta=True)
        for text in (
            Sample.of(f"{ONE.prompt} {token}", ONE.text, ONE.images),
            Sample.of(ONE.prompt, token, ONE.images),
        ):
            with pytest.raises(CorruptRecord, match=f"has {re.escape(token)} in its text, which .*Processor writes"):
                processor.encode(text)
        processor.encode(ONE)


def test_a_picture_that_the_processor_refuses_is_skipped_by_its_name(folders):
    _, processor = build_model(params(folders["qwen2_5_vl"]), meta=True)
    processor = replace(processor, max_length=400)
    line = replace(ONE, images=(picture(700, 2),), name="line")
    batch, without = processor([TEXT, line, ONE]), processor([TEXT, ONE])
    assert batch.skipped.keys() == {"line"} and "refused by Qwen2_5_VLProcessor" in batch.skipped["line"]
    assert batch.size == 2 and torch.equal(batch.input_ids, without.input_ids)
    alone = processor([line])
    assert alone.skipped.keys() == {"line"} and alone.size == 0 and alone.label_tokens == 0
    assert processor.takes(ONE) and not processor.takes(line) and not processor.takes(TEXT)
    processor.processor.image_processor = None
    with pytest.raises(Exception, match="NoneType"):
        processor([])


def test_of_two_records_of_one_id_only_the_one_that_cannot_be_used_is_skipped(folders):
    _, processor = build_model(params(folders["qwen2_5_vl"]), meta=True)
    processor = replace(processor, max_length=400)
    first = replace(ONE, images=(picture(700, 2),), name="same", where="row 1")
    second = replace(ONE, name="same", where="row 2")
    batch = processor([first, second])
    assert batch.size == 1 and batch.skipped.keys() == {"same (row 1)"}


def with_template(folder, target, template: str):
    """Copy a model's folder, with another chat template."""
    shutil.copytree(folder, target)
    processor = transformers.AutoProcessor.from_pretrained(folder)
    processor.chat_template = processor.tokenizer.chat_template = template
    processor.save_pretrained(target)
    return target


MARKED = (
    "{% for m in messages %}{% if m.role == 'user' %}{% if loop.first %}<image>{% endif %}what{% else %}"
    "{% generation %}{{ m.content[0].text }}END{% endgeneration %}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [CHAT.replace("IMAGE", "<image>"), MARKED], ids=["plain", "marked"])
def test_a_template_without_an_end_after_answers_is_warned_of(folders, tmp_path, template):
    """LLaVA 1.5's has none: trained with it, a model never learns to stop."""
    template = template.replace("<end>", "").replace("END", "")
    folder = with_template(folders["llava"], tmp_path / "model", template)
    plan, _ = preview(RunParams(model=params(folder, lora_rank=2), data={"max_length": 64}))
    (finding,) = plan.lint
    assert finding.level == "warning" and finding.code == "no-end"
    assert "writes no end token after an answer" in finding.message and "add </s> there" in finding.message
    with_end = with_template(folders["llava"], tmp_path / "end", template.replace("text }}", "text }}</s>"))
    assert not build_model(params(with_end), meta=True)[1].warnings


THINKING = (
    "{% for m in messages %}{% if m.role == 'user' %}<user>{% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}<end>"
    "{% else %}<assistant>{% if loop.last %}(thought){% endif %}{{ m.content[0].text }}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A template that leaves the thoughts out of earlier answers, as those of thinking models do."""


def test_a_template_that_changes_earlier_turns_is_found_before_a_run_meets_two(folders, tmp_path):
    chosen = params(with_template(folders["llava"], tmp_path / "model", THINKING), lora_rank=2)
    _, processor = build_model(chosen)
    assert list(processor.warnings) == ["several-turns"]
    with pytest.raises(CorruptRecord, match="'turns' cannot be learned from: .* changes earlier messages"):
        processor.encode(TURNS)
    assert processor([ONE]).size == 1

    def checked(turns: int):
        said = [{"from": ("human", "gpt")[i % 2], "value": "what"} for i in range(2 * turns)]
        rows = [{"id": i, "conversations": said} for i in range(3)]
        (tmp_path / "rows.json").write_text(json.dumps(rows))
        data = {"source": "json", "path": str(tmp_path / "rows.json"), "max_length": 64}
        return prepare(RunParams(model=chosen, data=data, train={"batch_size": 1})).plan

    assert [finding.code for finding in checked(1).lint] == ["several-turns"]
    with pytest.raises(ParamError, match="data.path has conversations of several turns: .*mark the answers in it by"):
        checked(2)


def test_a_template_without_system_texts_is_found_before_a_run_meets_one(folders, tmp_path):
    template = CHAT.replace("IMAGE", "<image>").replace("in messages %}", "in messages if m.role != 'system' %}")
    chosen = params(with_template(folders["llava"], tmp_path / "model", template), lora_rank=2)

    def checked(**fields):
        said = [{"from": "human", "value": "what"}, {"from": "gpt", "value": "a dog"}]
        rows = [{"id": i, "conversations": said, **fields} for i in range(3)]
        (tmp_path / "rows.json").write_text(json.dumps(rows))
        data = {"source": "json", "path": str(tmp_path / "rows.json"), "max_length": 64}
        return prepare(RunParams(model=chosen, data=data, train={"batch_size": 1})).plan

    assert not checked().lint and not checked(system="").lint
    with pytest.raises(
        ParamError, match="data.path has system texts: .* leaves it out; write it into the first question"
    ):
        checked(system="be short")


def test_pictures_of_llama4_of_any_number_of_tiles_share_a_batch(tmp_path):
    chosen = params(save_vlm("llama4", tmp_path / "llama4"), lora_rank=2)
    model, processor = build_model(chosen)
    batch = replace(processor, max_length=400)([TEXT, ONE, TURNS])
    assert batch.size == 3 and batch.media["pixel_values"].dtype is torch.float32
    assert torch.isfinite(model(**batch.inputs()).loss)


@pytest.mark.parametrize("family", ["qwen3_vl", "llava_onevision"])
def test_an_adapter_has_all_that_trains(folders, tmp_path, family):
    """Qwen3-VL's mergers are a list, and LLaVA-OneVision's image_newline is in no module that trains whole."""
    chosen = params(folders[family], lora_rank=2)
    model, processor = build_model(chosen)
    freeze_model(model, chosen)
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    save_adapter(model, RunParams(model=chosen), tmp_path)
    base, _ = build_model(params(folders[family]))
    adapted = PeftModel.from_pretrained(base, tmp_path).eval()
    inputs = replace(processor, max_length=400)([ONE, TURNS]).inputs()
    with torch.no_grad():
        torch.testing.assert_close(adapted(**inputs).logits, model.eval()(**inputs).logits, atol=1e-5, rtol=1e-5)


def test_the_plan_has_an_example_and_pictures_must_fit(folders):
    run = RunParams(model=params(folders["gemma3"], lora_rank=2), data={"max_length": 64}, train={"batch_size": 2})
    plan, cost = preview(run)
    assert plan.memory_events and cost.peak_bytes and not plan.lint
    before, after = "model.language_model.layers.0", "model.language_model.layers.1"
    plan, _ = preview(RunParams(model=params(folders["mllama"])))  # its projector is registered last, and runs first
    assert {unit.name: unit.grad_flow for unit in plan.units}.items() >= {before: False, after: True}.items()
    with pytest.raises(ParamError, match="data.max_length: 8 is too short for a picture of 28 x 28.*tokens; raise it"):
        preview(run.change(**{"data.max_length": 8}))


def test_a_plan_needs_the_configuration_only(folders):
    config = json.loads((folders["idefics3"] / "config.json").read_text())
    keys = ("model_type", "vision_config", "text_config", "scale_factor", "image_token_id")
    run = RunParams(model=ModelParams(kind="transformers", name="far/away", config={key: config[key] for key in keys}))
    plan, _ = preview(run)
    assert [p.name for p in plan.params if p.trainable] == ["model.connector.modality_projection.proj.weight"]


FOREIGN_FOLDERS = {
    "adapter": (
        {"adapter_config.json": '{"base_model_name_or_path": "org/base"}', "adapter_model.safetensors": "x"},
        r"it holds adapters of 'org/base' .*merge_and_unload\(\) and save_pretrained\(\), and give that folder",
    ),
    "nanovlm": (
        {"config.json": '{"vit_hidden_dim": 768, "lm_hidden_dim": 960}'},
        "its config.json names no model_type .it has lm_hidden_dim, vit_hidden_dim.*set model.build to a function",
    ),
    "gguf": ({"model.gguf": "GGUF"}, "it holds GGUF files, which are not read; give the original weights"),
    "weights": ({f"{i}.bin": "x" for i in range(9)}, "it has no config.json .it holds 0.bin, .*5.bin and 3 more"),
    "notes": ({"notes.txt": "x"}, "it has no config.json .it holds notes.txt.; give the folder that save_pretrained"),
}
"""Files of folders that hold no model of transformers, and the words of the error."""


def test_every_mistake_has_one_clear_error(folders, tmp_path):
    llava = folders["llava"]

    def refuse(match: str, folder=llava, **changes) -> None:
        with pytest.raises(ParamError, match=match):
            build_model(params(folder, **changes), meta=True)

    text_only = {"model_type": "gpt2", "n_layer": 1}
    refuse("model.config: gpt2 takes no pictures; choose one", config=text_only)
    refuse("model.name: .*nowhere.* gives no Config", tmp_path / "nowhere")
    for name, (files, match) in FOREIGN_FOLDERS.items():
        for file, text in files.items():
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / file).write_text(text)
        refuse(f"model.name: .*{name}' gives no Config: {match}", tmp_path / name)
    bare = tmp_path / "bare"
    transformers.AutoModelForImageTextToText.from_pretrained(llava).save_pretrained(bare)
    refuse("model.name: .*bare.* gives no Processor", bare)
    code = {"auto_map": {"AutoConfig": "code.Config"}, "model_type": "of_its_own"}
    (tmp_path / "config.json").write_text(json.dumps(code))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    refuse("model.name: .* gives no Config .*custom code", tmp_path)
    assert not (tmp_path / "ran").exists()
    processor = transformers.AutoProcessor.from_pretrained(llava)
    processor.tokenizer.save_pretrained(bare)
    refuse("model.name: .*bare.* gives no Processor .*image processor", bare)
    for template, match in {
        None: "does not have a chat template",
        "{% for m in messages %}{{ m.content[-1].text }}{% endfor %}": "gives 0 image tokens <image> for 1 pictures",
        "<image>{% if messages | length == 1 %}what{% endif %}it": "changes earlier messages",
        "<image>{{ messages.nothing.more }}": "fails with messages of user and assistant",
    }.items():
        folder = tmp_path / f"template-{len(list(tmp_path.iterdir()))}"
        processor.chat_template = processor.tokenizer.chat_template = template
        transformers.AutoModelForImageTextToText.from_pretrained(llava).save_pretrained(folder)
        processor.save_pretrained(folder)
        refuse(match, folder)
    config = transformers.AutoConfig.from_pretrained(llava)
    config.is_encoder_decoder = True  # as T5Gemma 2's, whose encoder would read the answer
    processor.chat_template = processor.tokenizer.chat_template = "<image>{{ messages }}"
    processor.save_pretrained(tmp_path / "encoder-decoder")
    config.save_pretrained(tmp_path / "encoder-decoder")
    refuse("model.name: .* is an encoder-decoder; choose a model that continues", tmp_path / "encoder-decoder")
    with pytest.raises(ParamError, match="model.weights: .* lacks .* weights"):
        build_model(params(llava, weights=str(folders["idefics3"])))


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("internvl_chat", "take its twin .* OpenGVLab/InternVL3-1B-hf"),
        ("llava_llama", "take its twin .* llava-hf/llava-1.5-7b-hf"),
        ("of_its_own", "take its twin .* on the hub look for own-hf"),
    ],
)
@pytest.mark.parametrize("auto_map", [True, False])
def test_a_model_with_code_of_its_own_names_its_twin(tmp_path, model_type, words, auto_map):
    (tmp_path / "own").mkdir()
    code = {"auto_map": {"AutoConfig": "code.Config"}} if auto_map else {}
    (tmp_path / "own" / "config.json").write_text(json.dumps({"model_type": model_type, **code}))
    with pytest.raises(ParamError, match=f"model.name: .*code that comes with a model is never run; {words}"):
        build_model(params(tmp_path / "own"), meta=True)


def test_a_published_configuration_names_all_keys_that_are_left_over(folders):
    config = json.loads((folders["llava"] / "config.json").read_text())
    assert build_model(ModelParams(kind="transformers", config=config), meta=True)
    config |= {"ignore_index": -100, "mm_hidden_size": 1024}
    left = "published, in which transformers does not read ignore_index, mm_hidden_size; remove them, or put the file"
    with pytest.raises(ParamError, match=f"model.config: config.json as {left} into a folder and set model.name to it"):
        build_model(ModelParams(kind="transformers", config=config), meta=True)
    qwen = json.loads((folders["qwen2_5_vl"] / "config.json").read_text())
    # As Qwen2.5-VL's was published: the keys of the language model beside the others.
    language = qwen.pop("text_config")
    flat = language | qwen
    flat.pop("image_token_index")  # the tiny models have it for other families
    model, _ = build_model(ModelParams(kind="transformers", config=flat), meta=True)
    assert model.config.text_config.hidden_size == flat["hidden_size"]


def test_a_missing_flash_attn_says_what_to_install_or_to_set(folders, tmp_path):
    assert find_spec("flash_attn") is None, "what is tested here is its absence"
    config = json.loads((folders["llava"] / "config.json").read_text())
    config["attn_implementation"] = "flash_attention_2"
    fix = "the package flash_attn is not installed: pip install flash-attn .* or set attn_implementation to sdpa"
    with pytest.raises(ParamError, match=f"model.config: .*{fix}"):
        build_model(ModelParams(kind="transformers", config=config), meta=True)
    folder = shutil.copytree(folders["llava"], tmp_path / "flash")
    (folder / "config.json").write_text(json.dumps(config))
    for meta in (True, False):
        with pytest.raises(ParamError, match=f"model.(name|weights): .*{fix}"):
            build_model(params(folder), meta=meta)


def test_weights_that_are_a_git_lfs_pointer_say_so(folders, tmp_path):
    folder = shutil.copytree(folders["llava"], tmp_path / "cloned")
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 9\n")
    for build in (build_model, open_model):
        with pytest.raises(ParamError, match="model.weights: .*model.safetensors is a Git LFS pointer"):
            build(params(folder))


def test_marks_of_the_template_say_what_is_learned(folders):
    _, processor = build_model(params(folders["llava"]), meta=True)
    processor.processor.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}<image>{{ loop.length }}{% else %}"
        "{% generation %}{{ m.content[0].text }}</s>{% endgeneration %}{% endif %}{% endfor %}"
    )
    labels = processor([ONE]).labels
    assert processor.tokenizer.decode(labels[labels != -100]) == "a red circle</s>"


def test_open_clips_tower_is_transformers_under_other_names():
    tower = build_vision(BackboneParams(source="open_clip", config=VISION)).visual
    vision = {"hidden_size": 24, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.CLIPVisionConfig(**vision, image_size=16, patch_size=8, hidden_act="gelu")
    model = transformers.CLIPVisionModel(config)
    model.load_state_dict(clip_names(tower.state_dict()))
    pixels = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        tokens = model.post_layernorm(model(pixels).last_hidden_state)
        torch.testing.assert_close(tower.eval()(pixels)[1], tokens[:, 1:])


PER_PICTURE = {
    "fsdp.sharding_strategy: FULL_SHARD all-gathers .*multi_modal_projector.* set it to SHARD_GRAD_OP": {},
    "fsdp.frozen_policy: SHARD all-gathers .*multi_modal_projector.* set it to KEEP or REPLICATE": {
        "model.freeze": ["vision", "projector"]
    },
    "fsdp.backend: FSDP all-gathers .*multi_modal_projector.* set it to DDP": {"model.freeze": ["language"]},
    None: {"fsdp.sharding_strategy": "SHARD_GRAD_OP"},
}


@pytest.mark.parametrize("message", PER_PICTURE)
def test_what_would_be_gathered_for_each_picture_is_refused_with_what_to_set(message):
    """LFM2-VL calls its projector for each picture: two ranks with unlike numbers of pictures ended in an abort."""
    config = {"model_type": "lfm2_vl", "image_token_id": 150, **families.FAMILIES["lfm2_vl"].config}
    run = RunParams(model=ModelParams(kind="transformers", config=config)).change(**PER_PICTURE[message])
    if message is None:
        preview(run)
        return
    with pytest.raises(ParamError, match=message):
        preview(run)


def test_a_misspelled_part_is_refused_with_the_parts(folders):
    chosen = params(folders["llava"], freeze=("languge",))
    with pytest.raises(ParamError, match="model.freeze: 'languge' is no pattern .* vision, projector, language, lora"):
        freeze_model(build_model(chosen, meta=True)[0], chosen)
