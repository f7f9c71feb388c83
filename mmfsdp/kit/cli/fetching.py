"""The command `mmfsdp fetch`: what a run loads, brought to a cluster whose nodes have no internet."""

from __future__ import annotations

from argparse import Namespace

from ...params.variables import with_variables
from ..run.files.run_record import TRAIN
from ..run.hub_cache import cache, fetch_weights, hub_weights, tell_of_hub
from ..run.pretraining import ensure_backbones, pretrains
from ..run.watch import ProgressBar
from .planning import CHECKING, chosen_params, say


def fetch(values: Namespace) -> int:
    """Bring the weights, the tokenizer and the data of a run into the caches of this machine; start nothing."""
    params = with_variables(chosen_params(values))
    tell_of_hub(say)
    fetch_weights(params, say)
    if pretrains(params, TRAIN):
        ensure_backbones(params, ProgressBar())
    say(CHECKING)
    from ..train.prepare import kept_model, opened

    opened(params)
    kept_model(params)  # with its tokenizer and processor
    for field, name in hub_weights(params).items():
        print(f"{name} ({field}) is in {cache()}")
    print("everything that the ranks load is in the caches of this machine; nodes find it if they see the same folders")
    return 0
