"""A run of a vision-language model of transformers on two ranks, LoRA beside matrices in int8: data with and without
pictures, resume, captions, export as transformers and peft load it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from mmfsdp import launch
from mmfsdp.checkpoint.steps import drop_after
from mmfsdp.kit.compat.export import export
from mmfsdp.kit.data.loader import SkippedRecords
from mmfsdp.kit.data.sources.splits import is_in_split
from mmfsdp.kit.models.build import build_model
from mmfsdp.kit.run.files.folder import read_json, read_metrics, write_json
from mmfsdp.kit.train.evaluate import HeldOut, caption_held_out, load_run, new_samples
from mmfsdp.params import ParamError, RunParams, load
from tests.ranks import in_processes
from tests.tiny_run import free_port, train_runs
from tests.tiny_vlms import save_vlm
from tests.train.test_resume import final

HELD_OUT_SHARE = 0.3


def unusable_rows() -> list[dict]:
    """Two rows of one id that are held out: one has an answer without text, the other's question is too long."""
    limit, number = int(HELD_OUT_SHARE * 2**32), 100
    while not is_in_split(limit, "heldout", f"rows.json:{number}"):
        number += 1
    rows = []
    for question, answer in (("what ?", " "), ("what ? " * 40, "there are 1")):
        turns = [{"from": "human", "value": f"<image>{question}"}, {"from": "gpt", "value": answer}]
        rows.append({"id": number, "images": ["1-0.png"], "conversations": turns})
    return rows


def params_in(folder: Path) -> RunParams:
    """The run's parameters; its model and its conversations are written into the folder."""
    save_vlm("qwen2_5_vl", folder / "model")
    rows = []
    for i in range(24):
        number = i % 3  # of pictures: none, one, two
        files = [f"{i}-{j}.png" for j in range(number)]
        for j, file in enumerate(files):
            Image.new("RGB", (40 + 8 * i, 60), ("red", "blue")[j]).save(folder / file)
        turns = [
            {"from": "human", "value": "<image>" * number + "how many ?"},
            {"from": "gpt", "value": f"there are {number}"},
        ]
        rows.append({"id": i, "images": files, "conversations": turns})
    (folder / "rows.json").write_text(json.dumps([*unusable_rows(), *rows]))
    return RunParams(
        model={"kind": "transformers", "name": str(folder / "model"), "lora_rank": 2},
        data={
            "source": "json",
            "path": str(folder / "rows.json"),
            "max_length": 80,
            "heldout_fraction": HELD_OUT_SHARE,
            "by_length": 2,
            "even_ranks": True,
        },
        train={"steps": 4, "batch_size": 1, "lr": 1e-2, "warmup_steps": 1, "save_every": 2, "device": "cpu"}
        | {"eval_every": 2, "eval_samples": 6},
        launch={"folder": str(folder / "runs"), "threads": 1},
        fsdp={"frozen_dtype": "int8", "not_quantized": ["*visual*"]},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vlm")
    params = params_in(folder)
    for name in ("whole", "resumed"):
        (folder / name).mkdir()
        params.to_yaml(folder / name / "params.yaml")
    in_processes(train_runs, 2, [str(folder / "whole")], [free_port()])
    shutil.copytree(folder / "whole/checkpoints", folder / "resumed/checkpoints")
    drop_after(folder / "resumed/checkpoints", 2)
    in_processes(train_runs, 2, [str(folder / "resumed")], [free_port()])
    return folder


@pytest.mark.real
def test_a_resumed_run_ends_as_the_unbroken_one(folder):
    result, resumed = read_json(folder / "whole/result.json"), read_json(folder / "resumed/result.json")
    assert result["wire_bytes_measured"] == result["wire_bytes_predicted"] and result["frozen_parameters_changed"] == 0
    assert resumed["frozen_parameters_changed"] == 0
    rows = read_metrics(folder / "whole", 0)
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and all(row["samples"] == 2 for row in rows)
    assert all(0 <= row["padding"] < 1 for row in rows) and any(row["padding"] for row in rows), "beside a blank row"
    assert "heldout_loss" in rows[1] and read_json(folder / "whole/plan.json")["plan"]["memory_events"]
    assert rows[2:] and [r["loss"] for r in read_metrics(folder / "resumed", 0)] == [r["loss"] for r in rows[2:]]
    assert final(folder / "whole") == final(folder / "resumed")


@pytest.mark.real
def test_held_out_records_that_cannot_be_used_are_counted_and_named(folder, tmp_path):
    number = unusable_rows()[0]["id"]
    first, second = f"rows.json:{number} (row 0)", f"rows.json:{number} (row 1)"
    skipped = read_json(folder / "whole/result.json")["skipped"]["data"]
    assert skipped["records"] == 2 and skipped["reasons"].keys() == {first, second}
    assert "an answer without text" in skipped["reasons"][first]
    assert "no token to learn from in its first 80" in skipped["reasons"][second]
    # Without eval_every only the captions after the training look at them.
    run = shutil.copytree(folder / "whole", tmp_path / "run")
    result = read_json(run / "result.json")
    result["skipped"]["data"] |= {"records": 0, "reasons": {}}
    write_json(run / "result.json", result)
    for _ in range(2):
        skipped = caption_held_out(run)["skipped"]["data"]
        assert skipped["records"] == 1 and skipped["reasons"].keys() == {first}


@pytest.mark.real
def test_captions_come_through_the_chat_template(folder):
    result = caption_held_out(folder / "whole")
    assert result["captions"] and all(row["truth"].startswith("there are") for row in result["captions"])
    assert (folder / "whole" / result["captions"][0]["image"]).is_file() and result["heldout_exact_match"] <= 1


@pytest.mark.real
def test_without_a_question_about_a_picture_nothing_is_captioned(folder, tmp_path):
    rows = [row for row in json.loads((folder / "rows.json").read_text()) if not row["images"]]
    (tmp_path / "text.json").write_text(json.dumps(rows))
    run = shutil.copytree(folder / "whole", tmp_path / "run")
    (run / "result.json").unlink()
    RunParams.from_yaml(run / "params.yaml").change(**{"data.path": str(tmp_path / "text.json")}).to_yaml(
        run / "params.yaml"
    )
    result = caption_held_out(run)
    assert result["captions"] == [] and "heldout_exact_match" not in result


@pytest.mark.real
def test_held_out_samples_that_do_not_fit_are_an_error(folder):
    params = RunParams.from_yaml(folder / "whole/params.yaml").change(**{"data.max_length": 12})
    _, processor = build_model(params.model, meta=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(
            ParamError, match="eval_every: no held-out sample of data can be used .*without text.*; raise data.max_len"
        ):
            HeldOut.open(params, processor, {"data": SkippedRecords("rows")})
    finally:
        dist.destroy_process_group()


@pytest.mark.real
def test_exports_are_plain_folders_of_transformers_and_peft(folder, tmp_path):
    from peft import PeftModel

    run = folder / "whole"
    params, model, processor = load_run(run)
    (_, samples), *_ = new_samples(params, processor, 3)
    inputs = processor.prompts(samples).inputs()
    _, beside_original, _ = load_run(run, quantized=False)
    with torch.no_grad():
        expected, unrounded = model(**inputs).logits, beside_original(**inputs).logits
    write_json(run / "result.json", {**read_json(run / "result.json"), "heldout_exact_match": 0.5})
    exported = AutoModelForImageTextToText.from_pretrained(export(run, tmp_path / "whole"))
    base = AutoModelForImageTextToText.from_pretrained(folder / "model")
    with torch.no_grad():
        assert not torch.allclose(base(**inputs).logits, expected, atol=1e-4)
        torch.testing.assert_close(exported(**inputs).logits, expected, atol=1e-4, rtol=1e-4)
        adapted = PeftModel.from_pretrained(base, export(run, tmp_path / "adapter", layout="adapter"))
        torch.testing.assert_close(adapted.eval()(**inputs).logits, unrounded, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(expected, unrounded, atol=1e-4), "int8 is seen here"
    assert AutoProcessor.from_pretrained(tmp_path / "whole").chat_template == processor.processor.chat_template
    card = (tmp_path / "whole/README.md").read_text()
    assert "Exact match on held-out pictures: 0.50" in card and f"base_model: {folder / 'model'}" in card
    with pytest.raises(ParamError, match="open_flamingo is for model.kind flamingo, not transformers"):
        export(run, tmp_path / "other", layout="open_flamingo")
    assert not (tmp_path / "other").exists()


@pytest.mark.real
@pytest.mark.extended
def test_the_preset_learns_to_caption_new_pictures(tmp_path):
    changes = {"train.steps": 200, "train.eval_every": None, "train.eval_samples": 50, "launch.folder": str(tmp_path)}
    run = launch(load("tiny_llava").change(**changes))
    assert run.wait().ok
    result = caption_held_out(run.path)
    assert result["heldout_exact_match"] >= 0.8 and result["text_only_exact_match"] <= 0.1
