"""What an option promises is seen in the wrapped model on real ranks: recomputing, compiling, formats."""

import copy

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import register_fsdp_forward_method

from mmfsdp.core.wrap import apply_plan
from mmfsdp.kit.train.cpu_memory import cpu_memory
from mmfsdp.params import FSDPParams, ParamError
from mmfsdp.planning import make_plan, wrap_fsdp
from tests.parity import whole

BACKENDS = ("DDP", "FSDP1", "FSDP2")
WIDTH, ROWS = 16, 2000


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 1 / 3))
        self.register_buffer("count", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(nn.functional.gelu(self.up(x)))


def model(*, half: bool = False) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(*[Layer() for _ in range(6)]), nn.Linear(WIDTH, 1))
    for p in made[0].parameters():
        p.requires_grad_(False)
    return made.to(torch.bfloat16) if half else made


def step(wrapped: nn.Module) -> tuple[float, list[float]]:
    """Loss, and the gradient's elements, of this rank's rows."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    loss = wrapped(x).float().square().mean()
    loss.backward()
    with FSDP.summon_full_params(wrapped, with_grads=True) if isinstance(wrapped, FSDP) else torch.no_grad():
        grads = [p.grad for p in wrapped.parameters() if p.grad is not None]
        return loss.item(), torch.cat([whole(g).flatten() for g in grads]).tolist()


def recomputed(backend: str) -> dict:
    found = {}
    for choice in ("none", "every:2", "1.[0-3]", "all"):
        wrapped = wrap_fsdp(model(), FSDPParams(backend=backend, activation_checkpointing=choice))
        step(wrapped)  # the first makes what stays
        wrapped.zero_grad()
        with cpu_memory() as memory:
            loss, grad = step(wrapped)
        found[choice] = {"loss": loss, "grad": grad, "peak": memory.peak}
    return found


def formats(backend: str) -> dict:
    fields = {"mixed_precision": "bf16", "reduce_dtype": "fp32", "frozen_dtype": "bf16", "buffer_dtype": "fp16"}
    wrapped = wrap_fsdp(model(half=True), FSDPParams(backend=backend, **fields))
    step(wrapped)
    rest: dict[bool, set[str]] = {True: set(), False: set()}
    for p in wrapped.parameters():
        rest[p.requires_grad].add(str(p.dtype))
    buffers = {name.rpartition(".")[2]: str(b.dtype) for name, b in wrapped.named_buffers()}
    grads = {str(p.grad.dtype) for p in wrapped.parameters() if p.grad is not None}
    return {"trainable": [*rest[True]], "frozen": [*rest[False]], "buffers": buffers, "grads": [*grads]}


def compiled(backend: str) -> dict:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    wrapped = wrap_fsdp(model(), FSDPParams(backend=backend, compile_units=True, activation_checkpointing="every:2"))
    loss, grad = step(wrapped)
    stats = torch._dynamo.utils.counters
    return {"loss": loss, "grad": grad, "breaks": len(stats["graph_break"]), "graphs": stats["stats"]["unique_graphs"]}


class Encoder(nn.Module):
    """Gives its features by a method that is not forward, and keeps statistics of what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.features(x).mean(0)


class Called(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.layers = Encoder(), nn.Sequential(Layer(), Layer())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.encoder.features(x))


def called(backend: str) -> dict:
    """A module called past its forward: held further up by a plan that saw it, or registered by hand (FSDP2 only)."""
    torch.manual_seed(0)
    plain, x = Called(), torch.randn(64, WIDTH)
    policy = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls": "Encoder,Layer"}
    plan = make_plan(plain, FSDPParams(backend=backend, **policy), world_size=2, example={"x": x})
    models = {"planned": apply_plan(copy.deepcopy(plain), plan)}
    if backend == "FSDP2":
        models["registered"] = wrap_fsdp(copy.deepcopy(plain), FSDPParams(**policy))
        register_fsdp_forward_method(models["registered"].encoder, "features")
    wanted = plain(x).square().mean()
    seen: dict = {"wanted": wanted.item(), "mean": plain.encoder.norm.running_mean.tolist()}
    seen["lint"] = [finding.code for finding in plan.lint]
    for name, wrapped in models.items():
        loss = wrapped(x).square().mean()
        loss.backward()
        mean = next(b for n, b in wrapped.named_buffers() if n.endswith("running_mean"))
        seen[name] = [loss.item(), mean.tolist()]
    return seen


def all_options() -> dict:
    checks = (recomputed, formats, compiled, called)
    return {backend: {check.__name__: check(backend) for check in checks} for backend in BACKENDS}


@pytest.fixture(scope="module")
def found():
    return on_ranks(all_options, 2)[0]


@pytest.mark.real
@pytest.mark.parametrize("backend", BACKENDS)
def test_recomputing_changes_memory_and_nothing_else(found, backend):
    seen = found[backend]["recomputed"]
    for choice in ("every:2", "1.[0-3]", "all"):
        assert seen[choice]["loss"] == seen["none"]["loss"] and seen[choice]["grad"] == seen["none"]["grad"]
    hidden = ROWS * 4 * WIDTH * 4  # bytes of a layer's inner activations, of which it keeps more than one
    peaks = [seen[choice]["peak"] for choice in ("none", "every:2", "1.[0-3]", "all")]
    assert all(after < before - hidden for before, after in zip(peaks, peaks[1:], strict=False))


@pytest.mark.real
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_format_is_where_it_was_asked_for(found, backend):
    seen = found[backend]["formats"]
    assert seen["trainable"] == seen["grads"] == ["torch.float32"] and seen["frozen"] == ["torch.bfloat16"]
    assert seen["buffers"] == {"scale": "torch.float16", "count": "torch.int64"}


@pytest.mark.real
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_units_compute_what_the_others_do(found, backend):
    seen, plain = found[backend]["compiled"], found[backend]["recomputed"]["none"]
    assert seen["loss"] == pytest.approx(plain["loss"], rel=1e-5) and seen["breaks"] == 0 < seen["graphs"]
    assert seen["grad"] == pytest.approx(plain["grad"], rel=1e-3, abs=1e-5)


@pytest.mark.real
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_module_may_be_called_by_another_method_and_batch_norms_are_warned_of(found, backend):
    seen = found[backend]["called"]
    assert "batch-norm" in seen["lint"] and "used-outside" not in seen["lint"]
    for way in {"planned", "registered"} & set(seen):
        loss, mean = seen[way]
        assert loss == pytest.approx(seen["wanted"], rel=1e-5) and mean == pytest.approx(seen["mean"], rel=1e-5)


def test_compiling_without_a_compiler_is_refused_before_launch(monkeypatch, tmp_path):
    """On the CPU torch compiles C++, and on a GPU triton compiles C."""

    def check(**variables):
        with monkeypatch.context() as patch:
            patch.delenv("CC", raising=False)
            patch.delenv("CXX", raising=False)
            for name, value in variables.items():
                patch.setenv(name, value)
            FSDPParams(compile_units=True).check_machine()

    check()
    with pytest.raises(ParamError, match="compile_units: .* C\\+\\+ .* no-such-compiler is not on PATH; install g\\+"):
        check(CXX="no-such-compiler")
    with pytest.raises(ParamError, match="compile_units: .* C compiler.* no-such-compiler is not on PATH; install gcc"):
        check(CC="no-such-compiler")
    for name in ("g++", "gcc", "clang"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    check(PATH=str(tmp_path), CC="clang -m64")
    (tmp_path / "gcc").unlink()
    check(PATH=str(tmp_path))  # triton takes clang, too
    (tmp_path / "clang").unlink()
    with pytest.raises(ParamError, match="compile_units: .* C compiler, and gcc or clang is not on PATH"):
        check(PATH=str(tmp_path))
    with pytest.raises(ParamError, match="compile_units: .* remove use_orig_params"):
        FSDPParams(backend="FSDP1", use_orig_params=False, compile_units=True)
