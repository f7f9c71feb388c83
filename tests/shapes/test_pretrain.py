"""Backbones are pretrained once, from the combinations that may be seen, into what open_clip and transformers load."""

import multiprocessing
import os
import random
import shutil
from dataclasses import replace

import open_clip
import pytest
import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer

from mmfsdp import launch
from mmfsdp.kit.models.generated import generated_folder, needs_backbones
from mmfsdp.kit.run.files.run_record import Status
from mmfsdp.kit.run.local import processes_of
from mmfsdp.kit.run.progress import part_of
from mmfsdp.kit.shapes.pretrain import Recipe, ensure_backbones, near_misses
from mmfsdp.kit.shapes.scenes import split_combinations
from mmfsdp.kit.shapes.texts import every_word, some_text
from mmfsdp.params import ParamError, RunParams, load
from tests.waiting import until

MINUTE = Recipe(vision_steps=2, language_steps=3, vision_colors=1, language_batch=8)


def minute_params() -> RunParams:
    """The demo's parameters with the smallest backbones."""
    values = load("tiny").to_dict()
    vision, language = values["model"]["vision"]["config"], values["model"]["language"]["config"]
    vision["vision_cfg"] |= {"width": 16, "layers": 1, "head_width": 16, "image_size": 16}
    vision["text_cfg"] |= {"width": 16, "heads": 1, "layers": 1}
    language |= {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    language |= {"num_key_value_heads": 1}
    return RunParams.from_dict(values)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MMFSDP_CACHE", str(tmp_path_factory.mktemp("cache")))
        steps: list[tuple[str, float]] = []
        torch.manual_seed(5)
        expected = torch.rand(1)
        torch.manual_seed(5)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # sums in another order give other last bits
        ensure_backbones(minute_params(), lambda *step: steps.append(step), recipe=MINUTE)
        torch.set_num_threads(threads)
        assert torch.equal(torch.rand(1), expected), "the global random state is left alone"
        assert [label for label, _ in steps] == ["vision encoder"] * 2 + ["language model"] * 3
        assert [fraction for _, fraction in steps] == pytest.approx([0.5, 1, 1 / 3, 2 / 3, 1])
        yield generated_folder(minute_params().model)


def test_open_clip_loads_the_vision_folder_and_its_tokenizer(folder):
    model = open_clip.create_model(f"local-dir:{folder / 'vision'}")
    assert type(model) is open_clip.CLIP and model.visual.preprocess_cfg["mean"] == [0.5, 0.5, 0.5]
    tokens = open_clip.get_tokenizer(f"local-dir:{folder / 'vision'}")(["two small red circles"])
    assert tokens.shape == (1, model.context_length)
    # CLIP's text tower reads at the highest id, which must be the end token
    assert int(tokens[0].argmax()) == len("two small red circles".split()) + 1
    picture, text, _ = model(torch.zeros(1, 3, 16, 16), tokens)
    assert picture.shape == text.shape == (1, 64)


def test_transformers_loads_the_language_folder_and_every_text_is_known(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder / "language")
    model = AutoModelForCausalLM.from_pretrained(folder / "language")
    assert len(tokenizer) == len(every_word()) + 4 <= model.config.vocab_size
    rng = random.Random(1)
    for text in (some_text(rng) for _ in range(200)):
        ids = tokenizer(text).input_ids
        assert ids[0] == tokenizer.bos_token_id and tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_the_second_call_is_instant(folder):
    ensure_backbones(minute_params(), pytest.fail, recipe=MINUTE)
    assert not needs_backbones(minute_params().model)
    ensure_backbones(RunParams(), pytest.fail)  # nothing to pretrain


def weights(folder):
    return {p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*.safetensors"))}


def work(cache, queue):
    os.environ["MMFSDP_CACHE"] = cache
    torch.set_num_threads(1)
    steps = []
    ensure_backbones(minute_params(), lambda *step: steps.append(step), recipe=MINUTE)
    queue.put(len(steps))


@pytest.mark.real
def test_of_two_processes_one_works_and_what_it_writes_is_the_same_again(folder, tmp_path):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    # As a process leaves it that was killed in mid-work.
    killed = tmp_path / f"{folder.name}.{os.getuid()}.part" / "vision"
    killed.mkdir(parents=True)
    workers = [context.Process(target=work, args=(str(tmp_path), queue)) for _ in range(2)]
    for worker in workers:
        worker.start()
    results = sorted(queue.get(timeout=600) for _ in workers)
    for worker in workers:
        worker.join()
    assert results == [0, MINUTE.vision_steps + MINUTE.language_steps]
    again = tmp_path / folder.name
    assert again.is_dir() and not killed.exists()
    assert len({path.stat().st_mode for path in again.rglob("*.*")}) == 1, "who may read the one may read all of it"
    assert weights(again) == weights(folder) and len(weights(folder)) == 2


@pytest.mark.real
def test_the_backbones_of_a_run_are_its_own_work(folder, tmp_path, monkeypatch):
    """Cancelling the run ends it; once another process has made them, the ranks start."""
    monkeypatch.setenv("MMFSDP_CACHE", str(tmp_path / "cache"))
    wanted = generated_folder(minute_params().model)
    wanted.parent.mkdir()
    changes = {"launch.folder": str(tmp_path), "train.steps": 1, "train.warmup_steps": 0, "train.device": "cpu"}
    changes |= {"train.eval_every": None, "launch.threads": 1}
    with FileLock(f"{wanted}.lock"):  # as of a process that works on them
        run = launch(minute_params().change(**changes))
        until(lambda: run.state().status is Status.PREPARING, words=lambda: str(run.state()))
        assert part_of(run.path, run.state()).part == "backbones"
        assert run.cancel().status is Status.CANCELLED
        assert not processes_of(run.record, run.path) and not wanted.exists()
        run.resume()
        until(lambda: run.state().status is Status.PREPARING, words=lambda: str(run.state()))
        shutil.copytree(folder, wanted)
    state = run.wait(600)
    assert state.ok and state.step == 1, f"{state}\n{state.traceback}"


def test_what_cannot_be_pretrained_names_the_field(tmp_path, monkeypatch):
    monkeypatch.setenv("MMFSDP_CACHE", str(tmp_path))
    good = minute_params()
    for change, field in (
        ({"model.vision.source": "transformers"}, "model.vision.weights"),
        ({"model.vision.config": {"embed_dim": 8, "vision_cfg": {}}}, "model.vision.weights"),
        ({"model.language.config": good.model.language.config | {"vocab_size": 10}}, "model.language.config"),
    ):
        with pytest.raises(ParamError) as error:
            ensure_backbones(good.change(**change), recipe=replace(MINUTE, vision_steps=0))
        assert error.value.field == field
        assert not generated_folder(good.change(**change).model).exists()


def test_a_contrastive_batch_holds_near_misses_and_nothing_unseen():
    seen, unseen = split_combinations()
    for step in range(50):
        shown = [group.combination for scene in near_misses(random.Random(step), 3) for group in scene.groups]
        assert len(shown) == len(set(shown)) and len({c.color for c in shown}) == 3
        assert set(shown) <= set(seen) and not set(shown) & set(unseen)
