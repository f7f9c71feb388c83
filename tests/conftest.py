"""In CI (`CI` is set) a skipped test is a failure: there, every real component must be present. And shared fixtures."""

import functools
import os
import re

import pytest


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
REAL_ROOMS = "(launch|bench|train)"
REAL_IMPORTS = re.compile(
    rf"^\s*(from|import) ((tests\.)?(ranks|tiny_run)|mmfsdp\.{REAL_ROOMS}|mmfsdp import .*\b{REAL_ROOMS})\b",
    re.MULTILINE,
)


@functools.cache
def is_real(path):
    """Whether the tests of a file start ranks, runs, a browser, a kernel or Slurm."""
    named = path.parent.name in REAL_FOLDERS or path.name in REAL_FILES
    return named or REAL_IMPORTS.search(path.read_text("utf-8")) is not None


FIRST = ("test_demo.py", "test_fuzz_params.py")
"""By its command, as a person's first, the demo pretrains the backbones that later tests use; the other is what takes
longest of what is not real."""


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: FIRST.index(item.path.name) if item.path.name in FIRST else len(FIRST))
    for item in items:
        if is_real(item.path):
            item.add_marker("real")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `-n`, one process has all real tests, in their order and never two at once; the others share the rest."""
    from xdist.scheduler import LoadScopeScheduling

    class RealInOne(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            return "real" if is_real(config.rootpath / file) else file

    config.option.loadscopereorder = False
    return RealInOne(config, log)


def pytest_runtest_setup(item):
    """What runs beside the real tests gives way to them."""
    if "PYTEST_XDIST_WORKER" in os.environ and item.config.option.markexpr != "not real" and not is_real(item.path):
        os.nice(10 - os.nice(0))


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """Where all tests keep pretrained backbones, so that they are pretrained once: not in the user's cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        if "MMFSDP_CACHE" not in os.environ:
            patch.setenv("MMFSDP_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def finished_run(tmp_path):
    """A run folder as the ranks leave it, written by the package's own writers; its texts are hostile."""
    from dataclasses import replace

    from PIL import Image
    from torch import nn

    from mmfsdp import runs
    from mmfsdp.estimate import estimate
    from mmfsdp.freeze import freeze
    from mmfsdp.params import FSDPParams, RunParams, TrainParams
    from mmfsdp.plan import make_plan

    folder = tmp_path / "first"
    (folder / "captions").mkdir(parents=True)
    RunParams(train=TrainParams(steps=20)).to_yaml(folder / "params.yaml")
    model = nn.ModuleDict({"tower": nn.Linear(64, 64), "head": nn.Linear(64, 8)})
    model.forward = lambda x: x
    freeze(model, ("tower.*",))
    plan = make_plan(model, FSDPParams(), world_size=2)
    plan = replace(plan, flops=10**9, moved=10**8, calls=100)
    cost = estimate(plan, TrainParams(), machine="laptop")
    runs.write_json(
        folder / "plan.json", {"plan": plan.to_dict(), "estimate": cost.to_dict(), "versions": {"torch": "2.11.0"}}
    )
    writer = runs.MetricsWriter(folder)
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
    runs.write_json(folder / "result.json", result)
    return folder
