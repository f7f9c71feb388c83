"""Find what makes a plan cost more than it need, and what its example shows. All findings are warnings."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import nn

from ..core.group import MIN_UNIT_PARAMETERS
from ..core.guards import note, some, warning
from ..core.names import plain_name
from ..core.plan import Param, UnitKind, WrapPlan
from ..core.recompute import checkpoints_itself
from ..core.token_loss import SWITCHED_OFF, LossLinear
from ..core.trace import output_made_to_require_grad
from ..params import AutoWrapPolicy
from ..params.findings import Finding
from ..params.fsdp import EMULATED

MAX_PADDING_SHARE = 0.25
"""Above this share of padding, the lint says which mesh has less."""
ROWS_OF_A_VOCABULARY = 1 << 13
"""A linear layer with as many outputs is taken for a head of logits."""
MIN_COMPILED_SHARE = 0.1
"""Share of a step from which the lint says what compiled units save: the predicted seconds of published eager steps are
as far from the measured ones (notebooks/reference/published.md)."""
COMPILATION_S = 60
"""Seconds that compiling takes at least, as `fsdp.compile_units` says: minutes, for a large model."""
ALIGNED = 8
"""Numbers in 16 bits of which a row must be a multiple, so that a GPU reads rows by 16 bytes: the fast kernels of
cuBLAS ask for that."""


def lint_cost(model: nn.Module, plan: WrapPlan, *, on_gpu: bool = False) -> tuple[Finding, ...]:
    """Return the findings. on_gpu: it will train on GPUs."""
    findings = [*_left_in_root(plan), *_over_sharded(plan), *_inputs_require_grad(model, plan)]
    findings += _whole_logits(model)
    if on_gpu:
        findings += _fp32_products(plan)
        findings += emulated_bf16(plan, card_without_bf16())
        findings += _odd_logits(model, plan)
    return tuple(findings)


def card_without_bf16() -> str:
    """Return the name of this process's GPU if it only emulates bf16; else, and where no GPU is in use yet, "".

    Asking would make a process that only plans a user of the GPU.
    """
    if not torch.cuda.is_initialized() or torch.cuda.is_bf16_supported(including_emulation=False):
        return ""
    return torch.cuda.get_device_name()


def emulated_bf16(plan: WrapPlan, card: str) -> Iterator[Finding]:
    """Find units that compute in bf16 on a card that only emulates it. card: its name; "" for all others."""
    if card and any(unit.compute_dtype == "bfloat16" for unit in plan.units):
        yield warning(
            "emulated-bf16", f"{card} {EMULATED}; set mixed_precision to fp16, for which train_step scales the loss"
        )


def units_to_compile(
    plan: WrapPlan, *, machine: str, seconds: float, compiled_seconds: float, steps: int
) -> Iterator[Finding]:
    """Find that compiling its units would save a run much of its time, or cannot save what it takes.

    Args:
        plan: A plan with the work of an example.
        machine: The GPU and network, by name.
        seconds: Of an eager step there, in one number.
        compiled_seconds: Of a step with compiled units.
        steps: Of the run.
    """
    saved = seconds - compiled_seconds
    whole = f"{steps * saved:,.0f} s in {steps:,} steps"
    if plan.fsdp.compile_units:
        if steps * saved < COMPILATION_S:
            yield warning(
                "compile-short",
                f"compile_units saves about {whole} on {machine}, and compiling takes longer at first; set it to false",
            )
    elif saved > MIN_COMPILED_SHARE * seconds and steps * saved > COMPILATION_S:
        share = plan.fusable_bytes / max(1, plan.moved_bytes)
        yield note(
            "compile-off",
            f"a step on {machine} takes about {seconds:.3g} s, and {compiled_seconds:.3g} s with compile_units, which "
            f"fuses {plan.fusable_kernels:,} of {plan.kernels:,} operators into others and saves {share:.0%} of the "
            f"bytes that operators move. That is {whole}, less what compiling takes at first; to try it, set "
            "fsdp.compile_units",
        )


def _odd_logits(model: nn.Module, plan: WrapPlan) -> Iterator[Finding]:
    """Find a head whose whole logits have rows that a GPU multiplies slowly in 16 bits."""
    if plan.mostly_fp32:
        return
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or isinstance(module, LossLinear):
            continue
        rows = module.out_features
        if rows >= ROWS_OF_A_VOCABULARY and rows % ALIGNED:
            yield warning(
                "odd-logits",
                f"{plain_name(name, model)}: a position has {rows:,} logits, no multiple of {ALIGNED}, and products of "
                "such rows in 16 bits were five times as slow on an H200; set model.loss_in_head, or pad the tables, "
                "such as by resize_token_embeddings(pad_to_multiple_of=8) of transformers",
            )


def _fp32_products(plan: WrapPlan) -> Iterator[Finding]:
    if plan.mostly_fp32 and torch.get_float32_matmul_precision() == "highest":  # torch's default
        yield warning(
            "fp32",
            "most of the model computes in fp32, in which a GPU multiplies matrices far below its rate in bf16 "
            "(TFLOP/s: H100 67 of 989, A100 19.5 of 312, RTX 4090 83 of 165); set mixed_precision to bf16, or for "
            "TensorFloat-32, with half of that rate and 10 bits of each factor, call "
            "torch.set_float32_matmul_precision('high') or export TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1, in a run by "
            "launch.setup",
        )


def _whole_logits(model: nn.Module) -> Iterator[Finding]:
    """Tell why a model that was asked to compute its loss in the head does not."""
    reason = getattr(model, "whole_logits", "")
    if reason and reason != SWITCHED_OFF:
        yield warning(
            "whole-logits",
            f"the loss is not computed in the head, so the logits of all positions are in memory at once: {reason}; "
            "lower train.batch_size or data.max_length if they do not fit",
        )


def _left_in_root(plan: WrapPlan) -> Iterator[Finding]:
    policy = plan.fsdp.auto_wrap_policy
    root = plan.units[0]
    total = sum(unit.numel for unit in plan.units)
    if not root.is_root or not root.sharded or root.numel == total or policy is AutoWrapPolicy.NO_WRAP:
        return
    # A tenth, so that small models for teaching get the warning as well.
    if root.numel > min(MIN_UNIT_PARAMETERS, total // 10):
        largest = max(root.params, key=lambda p: p.numel)
        fix = "set auto_wrap_policy to FROZEN_AWARE, or make units of their modules as well"
        if policy is AutoWrapPolicy.FROZEN_AWARE:
            fix = "use each only in its own module's forward; for a tied one in FSDP1, set backend to FSDP2"
        yield warning(
            "left-in-root",
            f"the root unit holds {root.numel:,} parameters (the largest is {largest.name}) from the first forward to "
            f"the end of backward; {fix}",
        )


def _over_sharded(plan: WrapPlan) -> Iterator[Finding]:
    """Find parameters with fewer rows than ranks that shard them, such as experts, if padding them costs much."""
    # FSDP2 shards the first dim of each parameter. FSDP1 shards a flat one, which has as many rows as elements.
    if not plan.rules.by_parameter or padding_share(plan, plan.shard) <= MAX_PADDING_SHARE:
        return
    fitting = []
    for shard in range(2, plan.shard):
        if plan.world_size % shard == 0 and padding_share(plan, shard) <= MAX_PADDING_SHARE:
            fitting.append(shard)
    if not fitting:  # a model as small as that has no use for so many ranks
        return
    params: list[Param] = []
    for unit in plan.sharded_units:
        params += unit.params
    worst = max(params, key=lambda p: p.padded(plan.shard) - p.numel)
    times = 1 + padding_share(plan, plan.shard)
    yield warning(
        "over-sharded",
        f"{worst.name}: {worst.shape[0]} rows over {plan.shard} ranks; FSDP2 shards the first dim and pads it to as "
        f"many rows for each rank, so all-gathers send {times:.3g} times the weights; set sharding_strategy to "
        f"HYBRID_SHARD with dp_shard {max(fitting)}",
    )


def padding_share(plan: WrapPlan, shard: int) -> float:
    """Return what FSDP2 adds to the sharded parameters so that so many ranks have equal shards, by what they hold."""
    numel = padded = 0
    for unit in plan.sharded_units:
        for p in unit.params:
            numel += p.numel
            padded += p.padded(shard)
    return padded / numel - 1 if numel else 0.0


def _inputs_require_grad(model: nn.Module, plan: WrapPlan) -> Iterator[Finding]:
    """Find frozen units that backward passes through only because an embedding's output was made to need a gradient."""
    embeddings = []
    for name, module in model.named_modules():
        if output_made_to_require_grad(module):
            embeddings.append(plain_name(name, model))
    # The root's unit begins first, whatever it holds, and ends last.
    trainable = [unit.order for unit in plan.units[1:] if unit.kind is not UnitKind.FROZEN]
    if not embeddings or not trainable:
        return
    # Nothing that trains comes before these units, so only their inputs can lead backward through them.
    frozen = [unit for unit in plan.units if unit.kind is UnitKind.FROZEN and unit.gathers_backward]
    only_by_inputs = [unit.name for unit in frozen if unit.order < min(trainable)]
    if only_by_inputs:
        fix = "call disable_input_require_grads(): only activation checkpointing with use_reentrant=True needs it"
        if reentrant_layers(model):
            # With both, what trains in a reentrant layer would get no gradient, without an error.
            fix = "set fsdp.activation_checkpointing instead of the model's own switch, which is reentrant here; or "
            fix += 'switch it on with {"use_reentrant": False}, and then call disable_input_require_grads()'
        yield warning(
            "inputs-require-grad",
            f"{some(only_by_inputs)}: frozen, before all that trains, and gathered again in backward, because "
            f"enable_input_require_grads() made the output of {some(embeddings)} require a gradient; {fix}",
        )


def reentrant_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that transformers' own switch (`gradient_checkpointing_enable`) checkpoints reentrantly."""
    layers = []
    for module in model.modules():
        # A partial of torch's checkpoint, with the arguments that the person gave.
        options = getattr(getattr(module, "_gradient_checkpointing_func", None), "keywords", {})
        if checkpoints_itself(module) and options.get("use_reentrant"):
            layers.append(module)
    return layers


def without_gradient(names: Sequence[str]) -> Iterator[Finding]:
    """Find trainable parameters to which the example's backward gave no gradient. names: theirs."""
    if names:
        yield warning(
            "no-gradient",
            f"{some(names)}: trainable, but the example's backward gives it no gradient: forward does not use it, or "
            "only for values that have none, such as ids of an argmax. If that is so in every step, it never learns, "
            "the plan may count gathers that do not come, and DDP fails at its second step; freeze it, or give an "
            "example that trains it. What some steps use must be used on all ranks alike, or the run ends",
        )


def loss_in_pieces_of_torch(dtypes: Collection[torch.dtype]) -> Iterator[Finding]:
    """Find `torch.nn.functional.linear_cross_entropy` where it computes in pieces. dtypes: of its hidden states."""
    if dtypes:
        names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        yield warning(
            "torchs-loss",
            f"the loss is torch's linear_cross_entropy with options, of hidden states in {names}: in 16 bits it rounds "
            "the loss itself (11.000 for 11.169), and its operator has no formula of FLOPs, so the plan, MFU and the "
            "predicted seconds lack those of the head; call mmfsdp.loss_in_head(model) before wrapping, and take the "
            "model's own loss, or compute the loss from logits",
        )
