"""A person's own model and metric: trained on two ranks as in one process, resumed to the last bit, mistakes named."""

import importlib
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import free_port, tiny_run, train_as_rank

from mmfsdp import checkpoint, launch
from mmfsdp.checkpoint.steps import complete_checkpoints
from mmfsdp.core.plan import WrapPlan
from mmfsdp.kit.compat.export import export
from mmfsdp.kit.data.open_sources import open_splits
from mmfsdp.kit.run.files.folder import read_json, read_metrics, read_result
from mmfsdp.kit.run.files.watched_file import read_watched
from mmfsdp.kit.run.state import runs_table
from mmfsdp.kit.run.trust import trust_run
from mmfsdp.kit.train.evaluate import caption_held_out, captions, load_run
from mmfsdp.kit.train.metrics import score
from mmfsdp.kit.train.prepare import frozen_model, prepare
from mmfsdp.kit.widgets.captioner import Captioner
from mmfsdp.kit.widgets.report import report_html
from mmfsdp.own.calls import OwnCodeError
from mmfsdp.params import ParamError, RunParams
from tests.ranks import in_processes
from tests.tracebacks import shows_package

OWN = Path(__file__).parent.parent / "files/own"
BACKENDS = ("DDP", "FSDP1", "FSDP2")
NOISY = {"call": "two_towers:build", "noise": 0.1, "dropout": 0.1}
VLM = {
    "model.build": "small_vlm:build",
    "train.metrics": [{"call": "small_vlm:score", "scale": 2.0, "peak_of": 6}],
    "train.eval_every": 2,
    "train.eval_samples": 5,
    "train.keep_best": "peak",
    "train.keep_last": 1,
    "train.steps": 12,
    "train.schedule": "constant",
}


@pytest.fixture(autouse=True)
def own_modules(monkeypatch):
    """The modules of tests/files/own can be imported."""
    monkeypatch.syspath_prepend(OWN)


def own_run(folder: Path, **changes) -> RunParams:
    """Parameters of a run of an own model over pictures: red circles and blue squares, whose texts differ in length.

    There are some more that the processor does not take.
    """
    params = tiny_run(folder, **{"data.augment": False, "data.heldout_fraction": 0.4})
    rows = folder / "pictures/metadata.jsonl"
    if "ugly" not in rows.read_text():
        text = rows.read_text().replace("a red circle", "red")
        for i in range(4):
            text += json.dumps({"file_name": f"{i}.png", "text": f"an ugly circle {i}"}) + "\n"
        rows.write_text(text)
    base = {"model.build": "two_towers:build", "train.batch_size": 3, "train.max_grad_norm": None}
    return params.change(**(base | changes))


def codes_of(plan: WrapPlan) -> list[str]:
    """Return the codes of a plan's findings, but for the one that a step takes more rows than `own_run` has."""
    return [finding.code for finding in plan.lint if finding.code != "few-rows"]


def runs_of_two_ranks(rank: int, _: str, folder: str, ports: list[int]) -> dict[str, str]:
    """Every run of this file that takes ranks. Returns what failed."""
    import sys

    sys.path.insert(0, str(OWN))
    ports, failed = iter(ports), {}

    def go(name: str, *, after: str = "", step: int = 2, ranks: int = 2, **changes) -> None:
        run = Path(folder, name)
        before = Path(folder, after) if after else None
        made = partial(own_run, Path(folder), **changes)
        error = train_as_rank(rank, run, made, port=next(ports), ranks=ranks, after=before, step=step)
        if error:
            failed[name] = error

    go("pairs-one", ranks=1, **{"train.accumulation": 4, "launch.ranks": 1})
    for backend in BACKENDS:
        chosen = {"fsdp.backend": backend}
        go(f"pairs-{backend}", **chosen)
        noisy = {**chosen, "model.build": NOISY}
        go(f"noisy-{backend}", **noisy, **{"data.workers": 1 if backend == "DDP" else 0})
        go(f"noisy-{backend}-resumed", after=f"noisy-{backend}", **noisy)
        go(f"vlm-{backend}", **chosen, **VLM, **{"train.async_save": backend == "DDP"})
        in_half = {"model.build": {"call": "two_towers:build_in", "dtype": "float16"}, "fsdp.mixed_precision": "fp16"}
        go(f"half-{backend}", **chosen, **in_half, **{"train.steps": 2})
    go("vlm-more", after="vlm-FSDP2", step=12, **(VLM | {"train.steps": 14}))
    go("value-FSDP2", **{"model.build": "two_towers:build_by_value", "train.steps": 2})
    return failed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    own_run(folder)
    failed = in_processes(runs_of_two_ranks, 2, str(folder), [free_port() for _ in range(24)])
    assert failed == [{}, {}], "\n".join(text for some in failed for text in some.values())
    return folder


def two_towers():
    return importlib.import_module("two_towers")


def open_heldout(params: RunParams, processor):
    return open_splits(params.data, image_size=processor.image_size, seed=params.train.seed)["heldout"]


@pytest.mark.real
def test_a_metric_that_fails_ends_the_run_by_its_name(pictures):
    changes = {"model.build": "small_vlm:build", "train.metrics": "wrong_models:of_one_sample", "launch.ranks": 2}
    run = launch(own_run(pictures, **changes, **{"train.eval_every": 1, "train.eval_samples": 5}))
    state = run.wait(600)
    error = "ValueError: knows one sample only"
    assert state.reason == f"rank 0: train.metrics: 'wrong_models:of_one_sample' raised {error}"
    assert 'raise ValueError("knows one sample only")' in state.traceback and not shows_package(state.traceback)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return tmp_path_factory.mktemp("pictures")


def column(run: Path, key: str) -> list[float]:
    return [row[key] for row in read_metrics(run) if key in row]


@pytest.mark.real
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_own_model_learns_on_two_ranks_as_in_one_process(folder, backend):
    for key in ("loss", "grad_norm"):
        of_ranks, of_one = column(folder / f"pairs-{backend}", key), column(folder / "pairs-one", key)
        assert len(of_ranks) == 6
        torch.testing.assert_close(torch.tensor(of_ranks), torch.tensor(of_one), rtol=1e-4, atol=1e-6)
    skipped = read_json(folder / f"pairs-{backend}" / "result.json")["skipped"]["data"]
    assert 1 <= skipped["records"] < 4  # one or more of the four are held out
    for label, reason in skipped["reasons"].items():
        assert label.startswith(("0.png", "1.png", "2.png", "3.png"))
        assert reason == "the processor does not take: ValueError: ugly pictures are not shown"


@pytest.mark.real
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_resumed_own_model_ends_as_the_unbroken_one_to_the_last_bit(folder, backend):
    last = []
    for name in (f"noisy-{backend}", f"noisy-{backend}-resumed"):
        newest = checkpoint.latest(folder / name / "checkpoints")
        files = sorted(newest.rglob("*.safetensors"))
        last.append({file.relative_to(newest): load_file(file) for file in files})
    assert last[0].keys() == last[1].keys() and len(last[0]) > 3
    for file, tensors in last[0].items():
        for name, tensor in tensors.items():
            assert tensor.numpy().tobytes() == last[1][file][name].numpy().tobytes(), (file, name)


@pytest.mark.real
@pytest.mark.parametrize("backend", BACKENDS)
def test_texts_of_two_ranks_are_those_of_the_unwrapped_model(folder, backend):
    run = folder / f"vlm-{backend}"
    rows = [row["scores"] for row in read_metrics(run) if "scores" in row]
    assert len(rows) == 6
    assert any(row["shortest"] < row["longest"] for row in rows), "a rank must end before another one"
    trust_run(run)
    params, model, processor = load_run(run)
    split = open_heldout(params, processor)
    samples = [sample for sample in split if not processor.refusal(sample)][:5]
    texts = captions(model, processor, samples)
    assert rows[-1] == read_result(run)["scores"]
    said = read_watched(run)
    assert [row["step"] for row in said.rows] == [1, 2, 4, 6, 8, 10, 12]
    assert said.rows[-1]["captions"] == texts and [each["truth"] for each in said.pictures] == [s.text for s in samples]
    assert score(params.train.metrics, texts, samples) | {"peak": rows[-1]["peak"]} == rows[-1]


@pytest.mark.real
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_best_checkpoint_survives_and_is_marked(folder, backend):
    run = folder / f"vlm-{backend}"
    scores = {row["step"]: row["scores"]["peak"] for row in read_metrics(run) if "scores" in row}
    assert scores == {2: -2, 4: -1, 6: 0, 8: -1, 10: -2, 12: -3}
    mark = {"step": 6, "name": "peak", "score": 0}
    assert checkpoint.best_of(run / "checkpoints") == mark == read_result(run)["best"]
    assert [int(path.name[5:]) for path in complete_checkpoints(run / "checkpoints")] == [6, 12]
    assert "best: peak 0 at step 6" in " ".join(runs_table({"vlm": run}).split())


@pytest.mark.real
def test_a_resumed_run_knows_the_best_checkpoint(folder):
    before = checkpoint.best_of(folder / "vlm-FSDP2/checkpoints")
    run = folder / "vlm-more"
    assert checkpoint.best_of(run / "checkpoints") == before == read_result(run)["best"]
    assert [int(path.name[5:]) for path in complete_checkpoints(run / "checkpoints")] == [before["step"], 14]
    trust_run(run)
    _, best, _ = load_run(run, best=True)
    _, newest, _ = load_run(run)
    assert any(not torch.equal(p, q) for p, q in zip(best.parameters(), newest.parameters(), strict=True))


@pytest.mark.real
def test_an_own_model_is_captioned_if_it_can_be_and_exported_as_its_state_dict(folder, tmp_path):
    for name in ("vlm-DDP", "pairs-DDP"):
        trust_run(folder / name)
    result = caption_held_out(folder / "vlm-DDP")
    assert [row["caption"] for row in result["captions"]] and "no_captions" not in result
    assert result["heldout_exact_match"] == result["scores"]["exact"] / 2, "of the same samples, by the same rule"
    first = result["captions"][0]["caption"]
    result = caption_held_out(folder / "pairs-DDP")
    assert result["captions"] == []
    words = "captions need a model with generate and a processor with prompts and decode"
    assert result["no_captions"].startswith(words) and words in report_html(folder / "pairs-DDP")

    captioner = Captioner(folder / "vlm-DDP").wait()
    assert captioner.answer.text == first and f">{first}<" in captioner.said.value
    assert "data:image/png" in captioner.seen.value
    captioner.close()
    with pytest.raises(ValueError, match=words):
        Captioner(folder / "pairs-DDP").wait()

    _, model, _ = load_run(folder / "pairs-DDP")
    to = export(folder / "pairs-DDP", tmp_path / "exported")
    fresh, _ = two_towers().build()
    fresh.load_state_dict(load_file(to / "model.safetensors"))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, fresh.state_dict()[name])
    with pytest.raises(ParamError, match="open_flamingo is for model.kind flamingo, not own"):
        export(folder / "pairs-DDP", tmp_path / "other", layout="open_flamingo")


@pytest.mark.parametrize(
    "name, message",
    [
        ("only_a_model", r"only_a_model returned a TwoTowers; return the tuple \(model, processor\)"),
        ("no_module", "returned a str for its model; return an nn.Module"),
        ("no_processor", "returned a list for its processor; return what turns rows into a dict"),
        ("missing", "missing is not there in .*wrong_models.py"),
        ("raising", "'wrong_models:raising' raised KeyError: 'large'"),
        ("lazy", "returned a model with lazy parameters; give its modules all their sizes"),
        ("compiled", "returned a model from torch.compile; return it as it is, and set fsdp.compile_units"),
        ("not_copied", "a copy of .*, for its plan, raised TypeError: cannot pickle 'generator' object"),
        ("without_loss", "Silent returns no loss"),
        ("of_a_loss_for_each_row", r"Rows returns a loss of shape \(2,\); it must be a scalar"),
        ("without_gradient", "the loss of .*without_gradient's model depends on no trainable parameter"),
        ("of_other_width", r"on a first batch, raised RuntimeError: .*; the processor made pixels: \(2, 12\)"),
        ("processor_without_tensors", "returned no tensor under pixels"),
        (
            "processor_that_takes_no_row",
            "on the first row of the data, raised LookupError: no column 'image'",
        ),
        ("processor_of_one_row", "failed on 2 rows together, and on none alone: ValueError: pictures of one batch"),
    ],
)
def test_a_mistake_in_an_own_model_is_one_error_before_any_rank(pictures, name, message):
    params = own_run(pictures, **{"model.build": f"wrong_models:{name}", "train.batch_size": 2})
    with pytest.raises(OwnCodeError, match=message) as caught:
        prepare(params)
    assert caught.value.field == "model.build"
    assert not shows_package(caught.value.traceback)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "precision"), [("float16", "fp16"), ("bfloat16", "bf16"), ("bfloat16", "fp32")])
def test_a_model_in_16_bits_is_planned_where_mixed_precision_casts_its_inputs(pictures, backend, dtype, precision):
    build = {"call": "two_towers:build_in", "dtype": dtype}
    params = own_run(pictures, **{"model.build": build, "fsdp.backend": backend, "fsdp.mixed_precision": None})
    refused = "a step of two_towers:build_in's model, on a first batch, raised"
    with pytest.raises(OwnCodeError, match=refused):
        prepare(params)
    params = params.change(**{"fsdp.mixed_precision": precision})
    if (backend, precision) == ("DDP", "fp32"):  # without autocast DDP casts nothing
        with pytest.raises(OwnCodeError, match=refused):
            prepare(params)
        return
    plan = prepare(params, activations=True).plan
    assert plan.memory_events
    assert not codes_of(plan)


@pytest.mark.real
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_in_16_bits_trains_on_inputs_in_fp32(folder, backend):
    losses = column(folder / f"half-{backend}", "loss")
    assert len(losses) == 2
    assert all(0 < loss < 10 for loss in losses)


def test_the_traceback_of_an_own_model_has_its_own_lines(pictures):
    for name, line in (("raising", 'width = {"small": 16}["large"]'), ("of_other_width", "self.words(words")):
        with pytest.raises(OwnCodeError) as caught:
            prepare(own_run(pictures, **{"model.build": f"wrong_models:{name}"}))
        assert line in caught.value.traceback and not shows_package(caught.value.traceback)


def test_a_model_that_needs_weights_is_planned_without_keeping_them(pictures):
    own_run(pictures)
    before = torch.get_rng_state()
    plans = {}
    for name in ("build", "build_by_value", "build_holding"):
        params = own_run(pictures, **{"model.build": f"two_towers:{name}"})
        plans[name] = prepare(params).plan
        model, _ = frozen_model(params.model)
        assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert torch.equal(before, torch.get_rng_state()), "planning draws no random numbers of the caller"
    assert not codes_of(plans["build"])
    assert "needs weights: it cannot be called under torch.device('meta')" in plans["build_by_value"].lint[0].message
    assert "half is a tensor that is neither a parameter nor a buffer" in plans["build_holding"].lint[0].message
    assert (
        {p for p, param in plans["build"].by_name.items() if not param.trainable}
        == {p for p, param in plans["build_by_value"].by_name.items() if not param.trainable}
        != set()
    )


def test_adapters_train_in_an_own_model_and_what_patterns_train(pictures):
    changes = {"model.lora_rank": 2, "model.lora_targets": ["up"], "model.freeze": ["!words.last.*"]}
    plan = prepare(own_run(pictures, **changes)).plan
    trained = {name for name, param in plan.by_name.items() if param.trainable}
    assert {name for name in trained if "lora_" not in name} == {"words.last.weight", "words.last.bias"}
    assert len(trained) == 2 + 2 * 4, "two matrices for each of four layers"


@pytest.mark.parametrize("name", ["reading_values", "with_a_backward_in_numpy"])
def test_a_step_that_reads_values_is_planned_by_the_order_of_its_modules(pictures, name):
    ready = prepare(own_run(pictures, **{"model.build": f"wrong_models:{name}"}), activations=True)
    assert ready.plan.lint[0].code == "own-forward" and not ready.plan.memory_events


def test_a_processor_that_draws_from_a_generator_of_its_own_is_told(pictures):
    for name, codes in (("wrong_models:processor_with_a_generator", ["own-random"]), ("two_towers:build", [])):
        plan = prepare(own_run(pictures, **{"model.build": name}), activations=True).plan
        assert codes_of(plan) == codes
        told = [each.message for each in plan.lint if each.code in codes]
        assert all("a resumed run is not as the unbroken one" in message for message in told)


def test_a_processor_that_workers_cannot_get_is_named(pictures):
    params = own_run(pictures, **{"model.build": "wrong_models:processor_of_one_row", "data.workers": 1})
    with pytest.raises(ParamError, match="cannot be sent to worker processes .* or set workers to 0"):
        prepare(params)


@pytest.mark.parametrize(
    "changes, field, message",
    [
        ({"train.metrics": ["small_vlm:failing"]}, "train.metrics", "small_vlm:failing' raised ZeroDivisionError"),
        ({"train.metrics": ["wrong_models:not_finite"]}, "train.metrics", "score = .*nan.*; return a finite number"),
        ({"train.metrics": ["wrong_models:no_dict"]}, "train.metrics", "returned float; return a dict of floats"),
        ({"train.metrics": ["wrong_models:of_odd_name"]}, "train.metrics", "a score called '<b>'; use letters"),
        ({"train.metrics": ["small_vlm:score"] * 2}, "train.metrics", "returned 'exact', which another metric has"),
        ({"train.metrics": ["small_vlm:score"], "train.keep_best": "exat"}, "train.keep_best", "choose .*exact"),
        ({"model.build": "two_towers:build"}, "train.metrics", "need a model with generate and a processor with prom"),
        ({"model.build": "wrong_models:not_synced", "launch.ranks": 2}, "model.build", "takes no synced_gpus"),
    ],
)
def test_a_mistake_in_a_metric_is_one_error_before_any_rank(pictures, changes, field, message):
    base = {"model.build": "small_vlm:build", "train.metrics": ["small_vlm:score"], "train.eval_every": 2}
    with pytest.raises(ParamError, match=message) as caught:
        prepare(own_run(pictures, **(base | changes)))
    assert caught.value.field == field


def test_metrics_ask_for_synced_tokens_only_where_ranks_shard(pictures):
    base = {"model.build": "wrong_models:not_synced", "train.metrics": ["small_vlm:score"], "train.eval_every": 2}
    for ddp in ({"fsdp.sharding_strategy": "NO_SHARD"}, {"fsdp.enable_fsdp": False}, {"fsdp.backend": "DDP"}):
        prepare(own_run(pictures, **base, **{"launch.ranks": 2}, **ddp))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"train.metrics": ["a:b"]}, "train.metrics: .*needs eval_every; set it"),
        ({"train.keep_best": "-heldout_loss"}, "train.keep_best: .*needs eval_every; set it"),
        ({"train.keep_best": "heldout_loss", "train.eval_every": 2}, "a lower loss is better; write -heldout_loss"),
        ({"train.keep_best": "acc", "train.eval_every": 2}, "'acc' is no score without metrics"),
        (
            {"model.kind": "multimodal"},
            "model.build: 'two_towers:build' is the kind own, but kind is multimodal; unset one of the two",
        ),
        ({"model.lora_rank": 2}, "model.lora_targets: is empty, and an own model needs it"),
        ({"data.feature_cache": "auto"}, "has no effect with model.kind own"),
    ],
)
def test_fields_of_own_code_that_do_not_go_together(pictures, changes, message):
    with pytest.raises(ParamError, match=message):
        own_run(pictures, **changes)


def test_kind_own_needs_a_model():
    with pytest.raises(ParamError, match="model.build: is unset, and kind own needs it; write my_module:name"):
        RunParams.from_dict({"model": {"kind": "own"}})
