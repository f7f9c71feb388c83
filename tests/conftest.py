"""In CI (`CI` is set) a skipped test is a failure: there, every real component must be present. And shared fixtures."""

import functools
import gc
import os
import sys
from pathlib import Path

import pytest

from tests import processes

# Tests share the cores with ranks and kernels, and threads that wait for each other's cores make all of them slow.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Hundreds of processes import the package. Where none may keep what it has compiled, each spends half a second on it,
# and each process of pytest some ten on the tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ["MMFSDP_ENTRIES"] = "tests.launch_entries,tests.fault_entries,tests.hang_entries"
"""Modules with functions that ranks of tests may call, beside the package's own; they find them by PYTHONPATH."""
os.environ["MMFSDP_WARM"] = "0"  # pages start no process beside those of the test; the runs of all tests share one
os.environ["PYTHONPATH"] = f"{Path(__file__).resolve().parent.parent}:{os.environ.get('PYTHONPATH', '')}"


def _fail_if_skipped(report):
    if report.skipped and os.environ.get("CI"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which is a failure in CI: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return _fail_if_skipped((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return _fail_if_skipped((yield))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection():
    """Keep the garbage collector from what stays to the end: the modules and tests, more than a million objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_configure(config):
    if os.environ.get("CI") and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(TellFailures(config))


class TellFailures:
    """Prints each failure at once: a run that is ended from outside never comes to its summary."""

    def __init__(self, config):
        self.config = config

    def pytest_runtest_logreport(self, report):
        if report.failed:
            reporter = self.config.pluginmanager.get_plugin("terminalreporter")
            reporter.write_line(f"\n{report.nodeid} ({report.when}) failed:\n{report.longreprtext[-2000:]}")


processes.note_processes()
STARTING_FIXTURES: set[tuple[str, str]] = set()
"""Fixtures that have started processes: where they are defined, and their names."""


def is_real(item):
    """Whether a test is marked to start processes: ranks, runs, a browser, a kernel, Slurm."""
    return item.get_closest_marker("real") is not None


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef):
    before = len(processes.started)
    try:
        return (yield)
    finally:
        if len(processes.started) > before:
            STARTING_FIXTURES.add((fixturedef.baseid, fixturedef.argname))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Have a test that is not marked `real` fail where it starts a process."""
    processes.started.clear()
    if not is_real(item):
        processes.refuse(lambda what: pytest.fail.Exception(f"not marked as real, but starts a process: {what}"))
    try:
        return (yield)
    finally:
        processes.refuse(None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown():
    """Let what a module's tests have shared end by a process, though the last of them starts none."""
    processes.refuse(None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Have a test that is marked `real` fail if it has started no process, and no fixture has for it."""
    result = yield
    if is_real(item):
        fixtures = [name for base, name in STARTING_FIXTURES if item.nodeid.startswith(base)]
        if not processes.started and not set(fixtures) & set(item.fixturenames):
            pytest.fail("marked as real, but starts no process: remove the mark", pytrace=False)
    elif processes.started:
        pytest.fail(f"not marked as real, but starts a process: {processes.started[0]}", pytrace=False)
    return result


@pytest.fixture(autouse=True)
def own_modules_leave(request):
    """Remove the modules that a test has imported from its own folder: another test's may have the same names."""
    if "tmp_path" not in request.fixturenames:
        yield
        return
    folder = f"{request.getfixturevalue('tmp_path')}{os.sep}"
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__dict__", {}).get("__file__")).startswith(folder):
            del sys.modules[name]


APART = {
    "slurm": "slurm",
    "run": "runs",
    **dict.fromkeys(("browser", "course", "notebooks", "slides"), "pages"),
}
"""Folders whose real tests mostly wait, for Slurm, ends of runs, a browser or a kernel, in the order in which they are
begun; and the group that each is in. A group has one test at a time, beside the tests of other groups."""


def place(item):
    """First the demo, by its command, as a person's first: it pretrains the backbones that later tests use.

    Those on Slurm and of runs, which run beside it, need none. Files without a real test come last.
    """
    if item.path.name == "test_demo.py":
        return -1
    folder = item.path.parent.name
    return list(APART).index(folder) if folder in APART and has_real_tests(item.path) else len(APART)


def pytest_collection_modifyitems(items):
    items.sort(key=place)


@functools.cache
def has_real_tests(path):
    """Whether a test of this file is marked `real`: xdist's scheduler knows the ids of tests, and no marks."""
    return "mark.real" in path.read_text("utf-8")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `-n 3`, one process has all files with ranks, one at a time; the others those that wait, then the rest."""
    from xdist.scheduler import LoadScopeScheduling

    class RanksInOne(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            path = config.rootpath / nodeid.partition("::")[0]
            if config.option.markexpr == "not real" or not has_real_tests(path):
                return str(path)
            return APART.get(path.parent.name, "ranks")

    config.option.loadscopereorder = False
    return RanksInOne(config, log)


def pytest_runtest_setup(item):
    """What runs beside the real tests gives way to them."""
    if "PYTEST_XDIST_WORKER" in os.environ and item.config.option.markexpr != "not real":
        if not has_real_tests(item.path):
            os.nice(10 - os.nice(0))


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """Where all tests keep pretrained backbones, so that they are pretrained once: not in the user's cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        if "MMFSDP_CACHE" not in os.environ:
            folder = tmp_path_factory.getbasetemp()
            if "PYTEST_XDIST_WORKER" in os.environ:
                folder = folder.parent  # that of all processes
            (folder / "cache").mkdir(exist_ok=True)
            patch.setenv("MMFSDP_CACHE", str(folder / "cache"))
        yield


@pytest.fixture(scope="session", autouse=True)
def key(tmp_path_factory):
    """Where the tests keep the key that shows whose runs are: not in the user's home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


LAUNCHING_FOLDERS = ["cli", "run", "train", "widgets"]
"""Folders whose real tests launch local runs."""


@pytest.fixture(scope="session")
def warm_process(cache, key):
    """The process that forks the local runs of all tests, so that torch is imported once for them.

    A run whose test changes the environment starts as any other.
    """
    from mmfsdp.kit.run import start
    from mmfsdp.kit.run.ranks import warm

    start_in_warm = start.start_in_warm

    def noted(words, **options):
        processes.note(f"by the warm process: {words}")
        return start_in_warm(words, **options)

    start.start_in_warm = noted
    yield
    start.start_in_warm = start_in_warm
    for process in warm.started_here.values():
        process.communicate()  # its stdin is closed, by which it ends


@pytest.fixture(autouse=True)
def _warm(request):
    """Start the warm process at the first test that may launch a run, and again where it has ended since."""
    if is_real(request.node) and request.node.path.parent.name in LAUNCHING_FOLDERS:
        request.getfixturevalue("warm_process")
        from mmfsdp.kit.run.ranks import warm

        before = list(processes.started)
        warm.start_warm()
        processes.started[:] = before  # not by this test


@pytest.fixture(scope="session")
def fork_server(cache, key):
    """The process that forks kernels of notebooks, and processes that make ranks of cells, so that they import once."""
    from tests.forked_python import ForkServer

    server = ForkServer(os.environ | {"OMP_NUM_THREADS": "1"})
    yield server
    server.close()


@pytest.fixture
def finished_run(tmp_path):
    """A run folder as the ranks leave it, written by the package's own writers; its texts are hostile."""
    from dataclasses import replace

    from PIL import Image
    from torch import nn

    from mmfsdp.core.freeze import freeze
    from mmfsdp.kit.run.files.folder import MetricsWriter, write_json
    from mmfsdp.params import FSDPParams, RunParams, TrainParams
    from mmfsdp.planning import make_plan
    from mmfsdp.predict import estimate

    folder = tmp_path / "first"
    (folder / "captions").mkdir(parents=True)
    RunParams(train=TrainParams(steps=20)).to_yaml(folder / "params.yaml")
    model = nn.ModuleDict({"tower": nn.Linear(64, 64), "head": nn.Linear(64, 8)})
    model.forward = lambda x: x
    freeze(model, ("tower.*",))
    plan = make_plan(model, FSDPParams(), world_size=2)
    plan = replace(plan, flops=10**9)
    cost = estimate(plan, TrainParams())
    write_json(
        folder / "plan.json", {"plan": plan.to_dict(), "estimate": cost.to_dict(), "versions": {"torch": "2.11.0"}}
    )
    writer = MetricsWriter(folder)
    for step in range(1, 21):
        writer.write({"step": step, "loss": 3.0 / step, "wire_bytes": cost.wire_bytes, "step_s": 0.05})
    Image.new("RGB", (48, 48), "red").save(folder / "captions/0.png")
    rows = [
        {
            "image": "captions/0.png",
            "truth": "one <img src=x onerror=alert(1)> & $circle$",
            "caption": "one red circle",
            "split": "heldout",
        },
        {"image": "../secret.png", "truth": "two stars", "caption": "two stars", "split": "unseen"},
    ]
    Image.new("RGB", (8, 8)).save(tmp_path / "secret.png")
    result = {
        "heldout_exact_match": 0.93,
        "text_only_exact_match": 0.01,
        "wire_bytes_predicted": cost.wire_bytes,
        "wire_bytes_measured": cost.wire_bytes,
        "frozen_parameters_changed": 0,
        "world_size": 2,
        "seconds": 61.0,
        "captions": rows,
    }
    write_json(folder / "result.json", result)
    return folder
