"""Weights on their way from files to shards: the right ones, on every rank, and never the whole model on one."""

import gc
import json
import os
import re
import shutil
import warnings
from pathlib import Path

import open_clip
import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from safetensors.torch import load_file, save_file
from tiny_run import tiny_run
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from mmfsdp.checkpoint import frozen_checksums
from mmfsdp.core.checksums import tensor_checksum
from mmfsdp.core.freeze import freeze
from mmfsdp.core.names import plain_name
from mmfsdp.core.quantize import quantize_model
from mmfsdp.core.wrap import apply_plan
from mmfsdp.kit.models import build_language
from mmfsdp.kit.models.build import build_model, open_model
from mmfsdp.kit.models.kinds import kind_of
from mmfsdp.kit.models.weight_files import Weights, tensor_sources
from mmfsdp.kit.train.cpu_memory import cpu_memory
from mmfsdp.kit.train.job import build
from mmfsdp.params import BackboneParams, FSDPParams, ParamError, RunParams
from mmfsdp.planning import make_plan
from tests.counted_files import CountedFiles
from tests.parity import bytes_held, whole

VISION = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 8, "layers": 4, "width": 48, "patch_size": 8, "head_width": 12},
    "text_cfg": {"context_length": 8, "vocab_size": 20, "width": 16, "heads": 2, "layers": 1},
}
LANGUAGE = {"model_type": "llama", "vocab_size": 10, "hidden_size": 48, "intermediate_size": 128}
LANGUAGE |= {"num_hidden_layers": 16, "num_attention_heads": 4, "tie_word_embeddings": True}
CASES = {
    "DDP": {"backend": "DDP"},
    "FSDP1": {"backend": "FSDP1"},
    "FSDP2": {},
    "FSDP1 replicate": {"backend": "FSDP1", "frozen_policy": "REPLICATE"},
    "FSDP2 replicate": {"frozen_policy": "REPLICATE"},
    "FSDP2 nf4": {"frozen_dtype": "nf4"},
    "FSDP2 hybrid": {"sharding_strategy": "HYBRID_SHARD", "dp_replicate": 2, "dp_shard": 2},
}
RANKS = 4
"""More than the rows of the vision encoder's two positions, and no divisor of the ten words."""
FAULTS = {
    "none": "",
    "no file": "",
    "lacks one": "00002-of-.* is missing",
    "torn": "00001-of-.* is not complete or not readable",
    "another training": "00003-of-.* is another file than rank 0's",
    "another training of later rows": "00003-of-.* is another file than rank 0's",
    "gone while it is read": "could not be read",
    "cut while it is read": "could not be read .*has changed since",
}
"""What is wrong with the files that the last rank sees, and the error; without an error rank 0 reads for all."""


@pytest.fixture(scope="module")
def params(tmp_path_factory) -> RunParams:
    """A run whose backbones lie in folders: open_clip's in one file, the language model's in several."""
    folder = tmp_path_factory.mktemp("weights")
    run = tiny_run(folder)
    torch.manual_seed(1)
    (folder / "vision").mkdir()
    save_file(open_clip.CLIP(**VISION).state_dict(), folder / "vision" / "open_clip_model.safetensors")
    (folder / "vision" / "open_clip_config.json").write_text(json.dumps({"model_cfg": VISION}))
    (folder / "language" / "model.safetensors").unlink()
    build_language(BackboneParams(config=LANGUAGE)).save_pretrained(folder / "language", max_shard_size="500KB")
    vision = {"weights": str(folder / "vision"), "config": VISION}
    language = {"weights": str(folder / "language"), "config": LANGUAGE}
    changes = {"model.num_latents": 4, "model.perceiver_depth": 1, "model.cross_attention_every": 6}
    changes |= {f"model.vision.{k}": v for k, v in vision.items()} | {
        f"model.language.{k}": v for k, v in language.items()
    }
    return run.change(**changes)


def load_each_way(values: dict, faults: str) -> dict:
    params = RunParams.from_dict(values)
    found = {fault: load_beside(Path(faults), fault) for fault in FAULTS}
    for case, fields in CASES.items():
        fsdp = params.change(**{f"fsdp.{k}": v for k, v in fields.items()}).fsdp
        gc.collect()
        with cpu_memory() as memory:
            first = torch.ones(1)  # the first that is seen tells what was held before
            memory.mark()
            del first
            model, _, weights = build(params)
            plan = make_plan(model, fsdp, world_size=RANKS)
            announced: list[str] = []
            sent = note_sent(weights)
            with CountedFiles().counting() as counts:
                model = apply_plan(model, plan, weights=weights, progress=announced.append)
        with FSDP.summon_full_params(model) if isinstance(model, FSDP) else torch.no_grad():
            # Of copies: a tensor whose memory numpy has seen can no longer be resized, as FSDP1 does next.
            sums = {plain_name(n, model): tensor_checksum(whole(p).clone()) for n, p in model.named_parameters()}
        found[case] = {
            "sums": sums,
            "announced": sorted(announced),
            "sent": sent,
            "in files": sorted(weights.places) if weights else [],
            "noted": weights.checksums if weights else {},
            "buffers": {plain_name(n, model): tensor_checksum(b) for n, b in model.named_buffers()},
            "peak": memory.peak - memory.at_mark,
            "shard": bytes_held(model),
            "largest": max(u.numel * 4 for u in plan.units),
            "whole": sum(p.numel for p in plan.params) * 4,
            "read": counts.bytes,
            "opened": dict(counts.opened),
        }
    return found


def note_sent(weights: Weights | None) -> list[str]:
    """Return a list to which the name of each tensor that rank 0 sends will be added."""
    sent: list[str] = []
    if weights is not None:
        pop = weights.pop
        weights.pop = lambda name: (sent.append(name), pop(name))[1]
    return sent


def load_beside(folder: Path, fault: str) -> list:
    """Load the language model where the last rank sees other files, by the same relative path."""
    damaged = dist.get_rank() == RANKS - 1

    def progress(name: str) -> None:
        if damaged and fault == "gone while it is read":
            shutil.rmtree("language", ignore_errors=True)
        if damaged and fault == "cut while it is read":
            for path in Path("language").glob("*.safetensors"):
                os.truncate(path, path.stat().st_size - 1)

    before = Path.cwd()
    os.chdir(folder / (fault if damaged else "none"))
    try:
        model = build_language(BackboneParams(config=LANGUAGE), meta=True)
        weights = Weights(model, tensor_sources(model, "language", "language")) if dist.get_rank() == 0 else None
        sent = note_sent(weights)
        plan = make_plan(model, FSDPParams(), world_size=RANKS)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = apply_plan(model, plan, weights=weights, progress=progress)
    except ParamError as error:
        return [str(error)]
    finally:
        os.chdir(before)
    sums = {name: tensor_checksum(whole(p)) for name, p in model.named_parameters()}
    return [sums, sent, [str(each.message) for each in caught if "rank 0 reads" in str(each.message)]]


@pytest.fixture(scope="module")
def faults(params, tmp_path_factory) -> Path:
    """A folder with one for each fault, in which the weights are as the last rank shall see them."""
    folder = tmp_path_factory.mktemp("faults")
    for fault in FAULTS:
        shutil.copytree(params.model.language.weights, folder / fault / "language")
    shutil.rmtree(folder / "no file" / "language")
    first, second, third, *_ = sorted(path.name for path in (folder / "none/language").glob("*.safetensors"))
    (folder / "lacks one/language" / second).unlink()
    torn = folder / "torn/language" / first
    torn.write_bytes(torn.read_bytes()[:-100])
    trained = folder / "another training/language" / third
    save_file({name: tensor + 1e-3 for name, tensor in load_file(trained).items()}, trained)
    trained = folder / "another training of later rows/language" / third
    tensors = load_file(trained)
    for tensor in tensors.values():
        if tensor.dim() > 1:  # such as a table of words, of which no text has had the first
            tensor[len(tensor) // 2 :] += 1e-3
    save_file(tensors, trained)
    return folder


@pytest.fixture(scope="module")
def found(params, faults):
    return on_ranks(load_each_way, RANKS, params.to_dict(), str(faults))


@pytest.mark.real
@pytest.mark.parametrize("case", CASES)
def test_no_rank_holds_more_than_its_shard_and_a_unit_while_weights_are_read(found, case):
    for rank in found:
        seen = rank[case]
        if "replicate" not in case and "DDP" not in case:
            assert seen["shard"] < 0.55 * seen["whole"]
        # FSDP1 copies the parameters of a unit into a flat one before it cuts its shard.
        units = 2 if case == "FSDP1" else 1
        assert seen["peak"] <= 1.15 * seen["shard"] + units * seen["largest"]


@pytest.mark.real
@pytest.mark.parametrize("case", CASES)
def test_every_rank_gets_the_files_weights_and_the_same_new_ones(params, found, case):
    model, _ = build_model(params.model)
    freeze(model, params.model.frozen_patterns)
    quantized = quantize_model(model, FSDPParams(**CASES[case]))
    frozen, names = frozen_checksums(model), [n for n, _ in model.named_parameters()]
    for rank in found:
        assert rank[case]["sums"] == found[0]["FSDP2 nf4" if quantized else "DDP"]["sums"]
        assert sorted(rank[case]["sums"]) == sorted(names) and bool(quantized) == ("nf4" in case)
        assert rank[case]["sums"].items() >= frozen.items()
        # A large model takes minutes, in which each tensor says that the rank is alive.
        assert set(rank[case]["announced"]) >= set(names)
        assert rank[case]["buffers"] == {n: tensor_checksum(b) for n, b in model.named_buffers()}


@pytest.mark.real
@pytest.mark.parametrize("case", CASES)
def test_rank_0_sends_only_what_the_other_ranks_cannot_read(params, found, case):
    """And the checksums that checkpoints hold are those of whole tensors, of which each rank has read a part."""
    first = found[0][case]
    model, _ = build_model(params.model)
    freeze(model, params.model.frozen_patterns)
    quantized = set(quantize_model(model, FSDPParams(**CASES[case])))
    assert set(first["sent"]) & set(first["in files"]) == quantized and len(first["in files"]) > 100
    frozen = frozen_checksums(model)
    assert frozen and {name: first["noted"].get(name) for name in frozen} == frozen


@pytest.mark.real
@pytest.mark.parametrize("case", CASES)
def test_all_ranks_together_read_each_byte_once(params, found, case):
    """And each opens a file once; rank 0 once more for what it sends, new words and matrices in nf4."""
    _, _, weights = open_model(params.model)
    stored, headers = 0, {}
    for name, place in weights.places.items():  # a file may hold more, such as open_clip's text encoder
        tensors = load_file(place.path)
        headers[place.path] = Path(place.path).stat().st_size - sum(tensor.nbytes for tensor in tensors.values())
        stored += tensors[place.key].nbytes
        if name.endswith("table.weight"):  # rank 0 reads the known words once more, from which new ones begin
            stored += tensors[place.key].nbytes
    read = 0
    for number, rank in enumerate(found):
        opened = rank[case]["opened"]
        assert opened and max(opened.values()) <= (2 if number == 0 else 1)
        read += rank[case]["read"] - sum(headers[path] * times for path, times in opened.items())
    assert read == stored, case


@pytest.mark.real
@pytest.mark.parametrize("fault", FAULTS)
def test_files_that_one_rank_sees_otherwise_are_one_error_on_all_ranks(found, fault):
    ranks = [rank[fault] for rank in found]
    if FAULTS[fault]:
        (message,) = ranks[0]
        assert ranks == [[message]] * RANKS and re.search(rf"weights: on rank 3 \(.*\) .*{FAULTS[fault]}", message)
        return
    assert all(sums == found[0]["none"][0] for sums, _, _ in ranks)
    _, sent, warned = ranks[0]
    if fault == "none":
        assert not warned and not set(sent) & set(ranks[0][0]), "buffers that no file holds"
    else:  # a node without the files
        assert len(sent) > 100 and len(warned) == 1
        assert "1 of 4 ranks, such as rank 3" in warned[0] and "do not see language/" in warned[0]


def test_weights_that_are_damaged_missing_or_misshaped_are_named(params, tmp_path):
    def changed(part: str, **files) -> tuple[RunParams, Path]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(getattr(params.model, part).weights, folder)
        for path in sorted(folder.glob("*.safetensors"))[:1]:
            tensors = {k: v.clone() for k, v in load_file(path).items()}
            for key, change in files.items():
                key = next(k for k in tensors if key in k)
                tensors[key] = change(tensors[key])
            save_file({k: v for k, v in tensors.items() if v is not None}, path)
        return params.change(**{f"model.{part}.weights": str(folder)}), next(iter(sorted(folder.glob("*.safetensors"))))

    torn, path = changed("language")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ParamError, match=f"language.weights: .*{path.name} is not complete"):
        open_model(torn.model)
    shaped, _ = changed("language", layers=lambda t: t[..., :-1].contiguous())
    with pytest.raises(ParamError, match=r"language.config: model.layers.* is \(.*\) in .* and \(.*\) in the model"):
        open_model(shaped.model)
    lacks, _ = changed("language", layers=lambda t: None)
    assert open_model(lacks.model)[2] is None
    with pytest.raises(ParamError, match="language.weights: .* lacks 1 weights, such as model.layers"):
        build_model(lacks.model)


def test_a_model_that_files_do_not_hold_is_known_before_it_is_built(params, tmp_path):
    def is_built_whole(params: RunParams) -> bool:
        return kind_of(params.model).is_built_whole(params.model)

    assert not is_built_whole(params)
    assert not is_built_whole(params.change(**{"model.vision.weights": "somebody/tower"})), "the hub is not asked"
    random = params.change(**{"model.vision.weights": None})
    folder = shutil.copytree(params.model.language.weights, tmp_path / "other_files")
    for path in folder.glob("*.safetensors*"):
        path.rename(path.with_suffix(".bin"))
    for without in (random, params.change(**{"model.language.weights": str(folder)})):
        assert is_built_whole(without) and open_model(without.model)[2] is None
    path = next(Path(shutil.copytree(params.model.language.weights, tmp_path / "torn")).glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-100])
    torn = random.change(**{"model.language.weights": str(path.parent)})
    for ask in (is_built_whole, lambda params: open_model(params.model)):
        with pytest.raises(ParamError, match=f"language.weights: .*{path.name} is not complete"):
            ask(torn)


def test_what_no_file_holds_begins_as_its_module_does(params):
    _, _, weights = open_model(params.model)
    model, _ = build_model(params.model)
    made = {name: weights.read(name) for name in weights.new_parameters}
    assert made.keys() == {n for n, _ in model.named_parameters()} - weights.sources.keys() and len(made) > 10
    for name, p in model.named_parameters():
        if name in made and p.numel() > 1 and p.std() > 0:
            assert made[name].std() == pytest.approx(p.std().item(), rel=0.5), name
        elif name in made:
            assert torch.equal(made[name], p), name
    assert open_model(params.change(**{"model.vision.weights": None}).model)[2] is None  # random: nothing to read
