"""check: look at this machine, then at ranks on it or in a Slurm job; a line for each finding, with what to do."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress

from ...params import ParamError, RunParams, load
from ...params.enums import imported
from ...params.run import with_cluster
from ...params.variables import with_variables
from ..run.interrupt import interruptible
from ..run.launchers.registry import launcher_named
from ..run.slurm.site import chosen_cluster
from ..verify.lines import NOTE, WRONG, Line
from .check_run import LOCAL_WAIT_S, CheckRun, Tell
from .judge import figures_of
from .places import RUN_FOLDER
from .site_report import SiteReport
from .this_machine import machine_lines

MACHINE = "this machine"
WAIT_MIN = 10.0

Show = Callable[[str, Line], object]
"""Called with where a line was found, and the line, as soon as it is there."""


def check(
    params: RunParams | str | None = None,
    *,
    cluster: str | None = None,
    wait_min: float = WAIT_MIN,
    show: Show | None = None,
    tell: Tell = print,
) -> SiteReport:
    """Check this machine, then ranks that are started as those of a run: here, or in a Slurm job of about a minute.

    Args:
        params: The parameters of a run, or a preset or YAML file: where its ranks start, where it writes, what it needs
            of the Hugging Face hub. Default: two ranks here.
        cluster: The profile of a cluster: the ranks are a Slurm job with it.
        wait_min: Minutes that the job may wait in the queue; then it is cancelled.
        show: Called with where a line was found, and the line, as soon as it is there.
        tell: Called with what takes the next seconds. Default: print.

    Returns:
        The report: `.ok`, `.lines`; as text and in a notebook it is a table with what to do.

    Raises:
        ParamError: If the parameters cannot be read, or there is no such profile.
    """
    chosen = load(params) if isinstance(params, str) else params or RunParams()
    if cluster is not None:
        chosen = chosen.change(**{"launch.executor": "slurm", "launch.cluster": cluster})
    return SiteCheck(chosen, show or (lambda place, line: None), tell, 60 * wait_min).report()


class SiteCheck:
    """One check, line after line."""

    def __init__(
        self,
        params: RunParams,
        show: Show,
        tell: Tell,
        wait_s: float,
        *,
        is_stopped: Callable[[], bool] = lambda: False,
    ):
        """wait_s: seconds that a job may wait in the queue. is_stopped: asked whether to end, all the time."""
        self.params, self.show, self.tell, self.wait_s = with_variables(params), show, tell, wait_s
        self.is_stopped = is_stopped
        self.found: list[tuple[str, Line]] = []
        self.folder = ""
        self.temporary = ""
        """A folder for the ranks where the run folder cannot be written."""
        self.machine: dict[str, float] = {}

    def report(self) -> SiteReport:
        """Do all checks. An interrupt ends the ranks, too."""
        for line in machine_lines(self.params):
            self.add(MACHINE, line)
        self.check_ranks()
        places, lines = zip(*self.found, strict=True)
        return SiteReport(lines=lines, places=places, folder=self.folder, machine=self.machine)

    def add(self, place: str, line: Line) -> None:
        """Keep a line, and show it."""
        self.found.append((place, line))
        self.show(place, line)

    def is_wrong(self, check: str) -> bool:
        """Return True if this check has found a fault so far."""
        return any(line.code == check and line.level == WRONG for _, line in self.found)

    def check_ranks(self) -> None:
        """Start ranks, here or in a job, and check them."""
        launcher = launcher_named(self.params.launch.executor)
        if launcher.command_lines:
            for line in imported(launcher.command_lines)(self.slurm_cluster()):
                self.add(MACHINE, line)
        # Ranks on this machine can still be checked, in a temporary folder.
        if self.is_wrong("sbatch") or (self.is_wrong(RUN_FOLDER) and not launcher.here):
            self.add(MACHINE, Line(NOTE, "job", "not started because of the errors above"))
            return
        try:
            check_run = self.started()
            if check_run is not None:
                lines = self.local_lines(check_run)
                if launcher.rank_lines:
                    lines = imported(launcher.rank_lines)(check_run, self.tell, self.wait_s)
                self.follow(check_run, lines)
        finally:
            if self.temporary and not self.folder:
                shutil.rmtree(self.temporary, ignore_errors=True)

    def slurm_cluster(self) -> str:
        """Return the cluster that the job goes to, as `chosen_cluster` does."""
        try:
            return chosen_cluster(with_cluster(self.params.launch))
        except ParamError:  # a profile that is wrong, which the line about the ranks says
            return ""

    def started(self) -> CheckRun | None:
        """Start the ranks, and return them. Return None if they cannot be started; a line says why."""
        params = self.params
        try:
            if self.is_wrong(RUN_FOLDER):  # ranks on this machine can be checked without it
                self.temporary = tempfile.mkdtemp(prefix="mmfsdp-check-")
                params = params.change(**{"launch.folder": self.temporary})
            check_run = CheckRun(params, self.is_stopped)
            check_run.check()
            self.tell(f"starting {check_run.place}")
            check_run.start()
        except (ParamError, OSError) as error:
            self.add(MACHINE, Line(WRONG, "ranks", f"they cannot be started: {error}"))
            return None
        return check_run

    def local_lines(self, check_run: CheckRun) -> Iterator[Line]:
        """Yield the lines of ranks that are no job of their own."""
        assert check_run.run is not None
        state = check_run.wait(self.tell, LOCAL_WAIT_S)
        if not state.done:
            check_run.run.cancel()
        yield from check_run.lines(state)

    def follow(self, check_run: CheckRun, lines: Iterator[Line]) -> None:
        """Add the lines of the ranks, and delete their folder unless something is wrong. An interrupt ends them."""
        assert check_run.run is not None
        is_wrong = False
        try:
            with interruptible("the ranks of the check are ended"):
                for line in lines:
                    self.add(check_run.place, line)
                    is_wrong = is_wrong or line.level == WRONG
        except BaseException:
            self.tell("ending the ranks")
            with suppress(TimeoutError, ParamError):
                check_run.run.cancel()
                check_run.remove()
            raise
        # Before the folder goes, which holds the facts.
        self.machine = figures_of(check_run.facts())
        if is_wrong:
            self.folder = str(check_run.run.path)
        else:
            check_run.remove()
