"""Which backend honors which option: tried out on FSDPParams itself, as a page.

`python -m mmfsdp.params.options > notebooks/reference/options.md` writes it anew.
"""

from __future__ import annotations

from dataclasses import fields
from enum import Enum
from typing import Any, get_args, get_type_hints

from .check import ParamError
from .docs import field_docs
from .enums import Backend
from .fsdp import FSDPParams

_WITH: dict[str, dict[str, Any]] = {
    "min_num_params": {"auto_wrap_policy": "SIZE_BASED_WRAP"},
    "transformer_layer_cls": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
    "memory_budget_gib": {"frozen_policy": "AUTO"},
    "dp_replicate": {"sharding_strategy": "HYBRID_SHARD"},
    "dp_shard": {"sharding_strategy": "HYBRID_SHARD"},
}
"""What else a field needs to have a meaning."""
_NEEDED: dict[str, dict[str, Any]] = {
    "TRANSFORMER_BASED_WRAP": {"transformer_layer_cls": "LlamaDecoderLayer"},
    "AUTO": {"memory_budget_gib": 16},
}
"""What else a value needs."""
_TEXTS = {"transformer_layer_cls": ["LlamaDecoderLayer"], "activation_checkpointing": ["all", "every:2", "*.layers.*"]}

_HEAD = """# FSDPParams: what each backend honors

Made by `python -m mmfsdp.params.options`, which tries each value with each backend. A refusal is an error that names
the field before any rank starts; nothing is ignored. `sharding_strategy: NO_SHARD` and `enable_fsdp: false` mean DDP.

Some refusals need the model or the machine, and come from `mmfsdp plan` or the launch: a class or a pattern that
matches nothing, `use_orig_params: false` with a unit that mixes frozen and trainable, `frozen_dtype` for weights that
every rank holds whole and computes with in another format, `cpu_offload` with FSDP1 on a CPU, `compile_units` without
a C++ compiler.

| field | DDP | FSDP1 | FSDP2 |
|---|---|---|---|
"""


def options_page() -> str:
    """A table of field and backend, in Markdown: honored, or the values that are refused; why; what the fields mean."""
    names = [f.name for f in fields(FSDPParams) if f.name != "backend"]
    why: dict[str, None] = {}
    rows = [[f"`{name}`", *(_cell(name, backend, why) for backend in Backend)] for name in names]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    docs = "\n".join(f"- `{name}`: {text}" for name, text in field_docs(FSDPParams).items())
    reasons = "\n".join(f"- {reason}" for reason in why)
    return f"{_HEAD}{table}\n\n## What a refusal says\n\n{reasons}\n\n## What the fields mean\n\n{docs}\n"


def _cell(name: str, backend: Backend, why: dict[str, None]) -> str:
    values = _values(name)
    refused = {str(value): reason for value in values if (reason := _refusal(name, value, backend))}
    why |= dict.fromkeys(refused.values())
    if len(refused) == len(values):
        return "refused"
    return f"all but {', '.join(refused)}" if refused else "honored"


def _refusal(name: str, value: Any, backend: Backend) -> str:
    wanted: dict[str, Any] = {"backend": backend, **_WITH.get(name, {}), name: value}
    for v in list(wanted.values()):
        wanted |= {k: other for k, other in _NEEDED.get(str(v), {}).items() if k not in wanted}
    try:
        FSDPParams(**wanted)
    except ParamError as error:
        return str(error)
    return ""


def _values(name: str) -> list[Any]:
    hint = get_type_hints(FSDPParams)[name]
    kind = next(t for t in get_args(hint) or (hint,) if t is not type(None))
    if issubclass(kind, Enum):
        return list(kind)
    plain: dict[type, list[Any]] = {bool: [True, False], int: [2], float: [16.0]}
    return _TEXTS.get(name) or plain[kind]


if __name__ == "__main__":
    print(options_page(), end="")
