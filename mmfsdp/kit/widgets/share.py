"""Show what makes a run again elsewhere: its YAML, its command and the batch file that Slurm receives, to copy."""

from __future__ import annotations

import shlex
from html import escape
from typing import Any

import ipywidgets as w

from ...params import Executor, ParamError, RunParams, load
from ...params.base import leaves
from .markup import error_note, note

COPY = (
    "const text = this.nextElementSibling;"
    "navigator.clipboard ? navigator.clipboard.writeText(text.textContent) :"
    " (getSelection().selectAllChildren(text), document.execCommand('copy'));"
    "this.textContent = 'Copied'; setTimeout(() => { this.textContent = 'Copy'; }, 2000)"
)


def command(config: str, params: RunParams) -> str:
    """Return the command that runs parameters which differ in a few values from a preset or a file."""
    before = leaves(load(config).to_dict())
    words = ["mmfsdp", "run", "--config", config]
    for name, value in leaves(params.to_dict()).items():
        if value != before.get(name):
            words += [f"--{name.replace('_', '-')}", _as_flag(value)]
    return shlex.join(words)


def _as_flag(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | dict):
        import yaml

        return yaml.safe_dump(value, default_flow_style=True, width=10**6).strip()
    return str(value)


def batch_file(params: RunParams) -> str:
    """Return what sbatch would receive. Raises ParamError for what Slurm needs and these parameters lack."""
    from ..run.slurm.slurm import sbatch_text  # imports submitit

    changes: dict[str, object] = {"launch.executor": Executor.SLURM.value}
    if params.launch.gpus_per_node is None and params.launch.cluster is None:
        changes["launch.gpus_per_node"] = params.launch.ranks_per_node  # a GPU for each rank
    return sbatch_text(params.change(**changes))


class Share(w.Tab):
    """YAML, command and batch file of parameters, each with a button that copies it."""

    def __init__(self) -> None:
        self._pages = [w.HTML(), w.HTML(), w.HTML()]
        super().__init__(self._pages, titles=("YAML", "command", "sbatch"))

    def show(self, config: str, params: RunParams) -> None:
        """Show these parameters, which were chosen from a preset or a file."""
        texts = (params.to_yaml, lambda: command(config, params), lambda: batch_file(params))
        abouts = (
            "mmfsdp run --config FILE runs this file, here or on a cluster.",
            "In a terminal, in this folder.",
            "What Slurm would receive; mmfsdp launch submits it where launch.executor is slurm.",
        )
        for page, text, about in zip(self._pages, texts, abouts, strict=True):
            try:
                page.value = note(about) + _copyable(text())
            except (ParamError, OSError) as error:
                page.value = error_note(error)


def _copyable(text: str) -> str:
    button = f'<button type="button" class="jupyter-button mm-copy" onclick="{escape(COPY)}">Copy</button>'
    return f'<div class="mm-copyable">{button}<pre class="mm-log mm-scroll" tabindex="0">{escape(text)}</pre></div>'
