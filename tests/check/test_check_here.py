"""`mmfsdp check` on this machine: nothing is wrong; then five faults, each found by the line that is for it."""

import json

import pytest

from mmfsdp.kit.cli import main
from mmfsdp.kit.widgets.check_button import CheckButton
from mmfsdp.kit.widgets.form import RunForm
from mmfsdp.params import RunParams
from mmfsdp.params.run import read_cluster
from tests.waiting import until

pytestmark = pytest.mark.real

FAULTS = {
    "packages": ("and 4.0 is installed", "python3 install.py"),
    "run folder": ("Not a directory", "set launch.folder"),
    "cache": ("Not a directory", "export MMFSDP_CACHE="),
    "hub": ("none/such (model.name)", "mmfsdp fetch"),
    "gloo": ("nosuch0", "launch.interface"),
}
"""By the check that is to find it: a part of its words, and of what to do."""


def test_this_machine_is_fit_for_runs(tmp_path, capsys):
    profile = tmp_path / "lab.yaml"
    profile.write_text("partition: gpu")
    words = ["--train.device", "cpu", "--launch.folder", str(tmp_path / "runs"), "--write", str(profile)]
    assert main(["check", "--json", *words]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and not report["folder"]
    states = {line["code"]: line["level"] for line in report["lines"] if line["where"] == "2 ranks on this machine"}
    assert states["ranks"] == states["versions"] == states["address"] == states["gloo"] == "ok", states
    assert not (tmp_path / "runs").exists(), "the folder of the ranks, and that of runs, are deleted"
    figures = read_cluster(str(profile)).machine
    assert figures == pytest.approx(report["machine"], rel=0.01) and figures["bandwidth"] > 0
    assert read_cluster(str(profile)).launch.partition == "gpu"


def test_faults_of_a_machine_are_found_each_by_its_line_and_by_a_button(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "old/transformers-4.0.dist-info").mkdir(parents=True)
    (tmp_path / "old/transformers-4.0.dist-info/METADATA").write_text("Name: transformers\nVersion: 4.0\n")
    monkeypatch.syspath_prepend(tmp_path / "old")
    monkeypatch.setenv("MMFSDP_CACHE", str(tmp_path / "file/cache"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    changes = {"launch.folder": str(tmp_path / "file/runs"), "train.device": "cpu"}
    changes |= {"model.kind": "transformers", "model.name": "none/such"}
    RunParams().change(**changes).to_yaml(tmp_path / "mine.yaml")
    button = CheckButton(RunForm(str(tmp_path / "mine.yaml")))
    assert button.button.description == "Check this machine"
    button.press()
    assert button.button.description == "End the check"
    until(lambda: button.button.description == "Check this machine", words=lambda: button.result.value)
    report = button.report
    assert not button.busy and report._repr_html_() == button.result.value
    wrong = {line.code: line for line in report.wrong}
    assert wrong.keys() == FAULTS.keys(), str(report)
    for check, (words, fix) in FAULTS.items():
        assert words in wrong[check].message and fix in wrong[check].fix, wrong[check]
    assert not report.ok and button.result.value.count("<b>wrong</b>") == len(FAULTS)
    assert str(report).count("wrong  ") == len(FAULTS)
    assert json.loads(report.to_json())["ok"] is False
