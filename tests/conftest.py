"""In CI (`CI` is set) a skipped test is a failure: there, every real component must be present. And shared fixtures."""

import functools
import os
import re
from pathlib import Path

import pytest

# Tests share the cores with ranks and kernels, and threads that wait for each other's cores make all of them slow.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["MMFSDP_ENTRIES"] = "tests.launch_entries,tests.fault_entries"
"""Modules with functions that ranks of tests may call, beside the package's own; they find them by PYTHONPATH."""
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


REAL_FOLDERS = {"browser", "course", "notebooks", "slides", "slurm", "ways_in"}
REAL_FILES = {"test_demo.py", "test_features.py", "test_pretrain.py", "test_environment.py"}
REAL_ROOMS = "(launch|run|train|cli.bench_wrap|cli.bench_step|cli.spawn_ranks)"
REAL_TESTS = r"(tests\.)?(ranks|tiny_run|bench\.peaks)"
REAL_IMPORTS = re.compile(
    rf"^\s*(from|import) ({REAL_TESTS}|mmfsdp\.{REAL_ROOMS}|mmfsdp import .*\b{REAL_ROOMS})\b", re.MULTILINE
)


@functools.cache
def is_real(path):
    """Whether the tests of a file start ranks, runs, a browser, a kernel or Slurm."""
    named = path.parent.name in REAL_FOLDERS or path.name in REAL_FILES
    return named or REAL_IMPORTS.search(path.read_text("utf-8")) is not None


WAITING_FOLDERS = ["slurm", "browser", "course", "notebooks", "slides"]
"""Real tests that mostly wait, for Slurm, a browser or a kernel, in order: they run beside those with ranks."""


def place(item):
    """First the demo, by its command, as a person's first: it pretrains the backbones that later tests use.

    Those on Slurm, which run beside it, need none.
    """
    if item.path.name == "test_demo.py":
        return -1
    folder = item.path.parent.name
    return WAITING_FOLDERS.index(folder) if folder in WAITING_FOLDERS else len(WAITING_FOLDERS)


def pytest_collection_modifyitems(items):
    items.sort(key=place)
    for item in items:
        if is_real(item.path):
            item.add_marker("real")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `-n 2`, one process has all tests with ranks, one at a time; the other those that wait, then the rest."""
    from xdist.scheduler import LoadScopeScheduling

    class RanksInOne(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            path = config.rootpath / nodeid.partition("::")[0]
            if path.parent.name in WAITING_FOLDERS:
                return "waiting"
            return "ranks" if is_real(path) else str(path)

    config.option.loadscopereorder = False
    return RanksInOne(config, log)


def pytest_runtest_setup(item):
    """What runs beside the real tests gives way to them."""
    if "PYTEST_XDIST_WORKER" in os.environ and item.config.option.markexpr != "not real" and not is_real(item.path):
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


@pytest.fixture
def finished_run(tmp_path):
    """A run folder as the ranks leave it, written by the package's own writers; its texts are hostile."""
    from dataclasses import replace

    from PIL import Image
    from torch import nn

    from mmfsdp.core.freeze import freeze
    from mmfsdp.estimate import estimate
    from mmfsdp.estimate.make_plan import make_plan
    from mmfsdp.params import FSDPParams, RunParams, TrainParams
    from mmfsdp.run.folder import MetricsWriter, write_json

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
