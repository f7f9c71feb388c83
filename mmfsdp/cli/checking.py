"""The command `mmfsdp check`: is this machine, or this cluster, fit for runs?"""

from __future__ import annotations

from argparse import Namespace

from ..checks.lines import Line
from ..params.base import without_controls
from ..params.flags import params_of
from ..site_check.check import check as check_site
from ..site_check.check import heading
from .planning import say


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

    report = check_site(params_of(values), cluster=values.cluster, show=None if values.json else show, tell=tell)
    print(report.to_json() if values.json else report.summary())
    return int(not report.ok)
