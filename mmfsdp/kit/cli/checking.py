"""The commands that prepare a machine or a cluster for runs: check and fetch.

`check` looks whether it is fit for them; `fetch` downloads what a run loads, for nodes without internet.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from ...params import ParamError
from ...params.base import without_controls
from ...params.variables import with_variables
from ..check.check import check as check_site
from ..check.machine_figures import machine_block, write_machine
from ..check.site_report import SiteReport, heading
from ..run.files.run_record import TRAIN
from ..run.hub_cache import cache, fetch_weights, hub_weights, tell_of_hub
from ..run.pretraining import ensure_backbones, pretrains
from ..run.watch import ProgressBar
from ..verify.lines import Line
from .flags import params_of
from .json_output import reply
from .planning import CHECKING, chosen_params, say


def check(values: Namespace) -> int:
    """Check this machine, and ranks on it or in a Slurm job. Returns 1 if a line is wrong."""
    before = ""

    def show(place: str, line: Line) -> None:
        nonlocal before
        if place != before:
            print(heading(place))
        before = place
        print(line, flush=True)

    def tell(text: str) -> None:
        say(without_controls(text))

    params = params_of(values)
    report = check_site(params, wait_min=values.wait, show=None if values.json else show, tell=tell)
    if not values.json:
        print(report.summary())
    if values.write is not None:
        write_figures(report, values.write)
    if values.json:
        from .answers import CheckAnswer

        return reply(values, CheckAnswer(**report.to_dict()))
    return int(not report.ok)


def write_figures(report: SiteReport, file: str) -> None:
    """Add what was measured to a profile, or print it where no file is named. Raises ParamError if there is none."""
    if not report.machine:
        raise ParamError("--write", "no bandwidth was measured; correct the errors above, and check again")
    about = next((line.message for line in report.lines if line.code == "bandwidth"), "")
    block = machine_block(report.machine, about)
    if not file:
        print(block, end="")
        return
    write_machine(Path(file), block)
    say(f"{file} has the measured figures")


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
