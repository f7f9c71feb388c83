"""Lines of a check made from facts: what somebody else has written stays text in a terminal and on a page."""

from dataclasses import replace

import pytest
from torch import nn

from mmfsdp.core.plan import ring_bytes
from mmfsdp.kit.check.judge import Asked, figures_of, rank_lines
from mmfsdp.kit.check.machine_figures import bandwidth_line, machine_block, machine_figures, write_machine
from mmfsdp.kit.check.places import SHM, probe
from mmfsdp.kit.check.rank_facts import facts_of
from mmfsdp.kit.check.site_report import SiteReport
from mmfsdp.kit.check.this_machine import place_line
from mmfsdp.kit.verify.lines import Line
from mmfsdp.kit.widgets.check_button import CheckButton
from mmfsdp.kit.widgets.form import RunForm
from mmfsdp.params import FSDPParams, ParamError, RunParams
from mmfsdp.params.run import read_cluster
from mmfsdp.planning import make_plan
from mmfsdp.predict import machine_of_run
from mmfsdp.predict.seconds import wire_time as sent_seconds
from mmfsdp.predict.wire import CollectiveCount
from tests.mutated import cases
from tests.waiting import until

HOSTILE = "<img src=x onerror=alert(1)>\x1b]0;title\x07\x1b[31m"


def rank(number: int, **changes):
    """The facts of a rank on which nothing is wrong, but for the changes of its parts."""
    facts = {
        "rank": number,
        "doing": "",
        "node": {"node": f"node{number}", "python": "3.11", "mmfsdp": "1", "environment": {}},
        "folders": {"token": "t", "places": {"run folder": {"path": "/shared", "free": 1 << 40}}},
        "torch": {"version": "2.14", "transformers": "5.0", "gpus": []},
        "address": {"host": "node0", "GLOO_SOCKET_IFNAME": "ib0"},
        "hub": {"missing": []},
        "gloo": {"sum": 3.0, "ranks": 2, "times": [0.0, 0.5]},
        "nccl": {"skipped": "no rank trains on a GPU", "wanted": False},
    }
    for part, values in changes.items():
        facts[part] = {**facts[part], **values} if isinstance(values, dict) else values
    return facts


def lines(*ranks, torch="2.14", **changes):
    """The lines on these ranks of a Slurm job, by their check. torch: version on the machine that checks."""
    values = {"launch.executor": "slurm", "launch.ranks": 2, "launch.nodes": 2, "train.device": "cpu"}
    versions = {"torch": torch, "transformers": "5.0", "mmfsdp": "1"}
    asked = Asked(RunParams().change(**values | changes), 2, "t", versions)
    return {line.code: line for line in rank_lines(asked, dict(enumerate(ranks)))}


def test_nothing_is_wrong_where_nothing_is():
    assert {line.level for line in lines(rank(0), rank(1)).values()} == {"ok"}


def test_what_a_rank_finds_is_told_with_its_node_by_the_line_that_is_for_it():
    for check, (words, fix), faulty in (
        (
            "versions",
            ("torch is 2.14 on rank 0 on node0, 2.9 on rank 1", "launch.python"),
            {"torch": {"version": "2.9"}},
        ),
        (
            "run folder",
            ("does not see the file that this machine wrote", "that all nodes share"),
            {"folders": {"token": ""}},
        ),
        (
            "address",
            ("rank 1 on node1: no rank reaches it", "set it"),
            {"address": {"error": "no rank reaches it", "fix": "set it"}},
        ),
        ("gloo", ("rank 1 on node1: timed out", "launch.interface"), {"gloo": {"error": "timed out"}}),
        ("nccl", ("rank 1 on node1 was killed during this check", "NCCL_DEBUG"), {"doing": "nccl"}),
    ):
        found = lines(rank(0), rank(1, **faulty))
        assert [name for name, line in found.items() if line.level == "wrong"] == [check], found
        assert words in found[check].message and fix in found[check].fix, found[check]
    clocks = lines(rank(0, gloo={"times": [0.0, 90.0]}), rank(1))["clocks"]
    assert clocks.level == "wrong" and "90.0 s" in clocks.message


@pytest.mark.parametrize(("here", "there"), [("2.14", "2.14+cu130"), ("2.14+cpu", "2.14+cpu"), ("2.14+cpu", "2.14")])
def test_versions_that_differ_in_their_build_alone_are_equal(here, there):
    """A wheel of PyTorch's own index has the build in the version of the package, one of PyPI has not."""
    on_ranks = {"torch": {"version": there}}
    assert lines(rank(0, **on_ranks), rank(1, **on_ranks), torch=here)["versions"].level == "ok"
    line = lines(rank(0, **on_ranks), rank(1, **on_ranks), torch="2.13+cpu")["versions"]
    assert line.level == "note" and line.message.endswith("has torch 2.13+cpu")


def test_a_check_that_cannot_begin_says_why_and_its_button_can_be_pressed_again(tmp_path, monkeypatch):
    monkeypatch.delenv("NOT_SET", raising=False)
    RunParams().change(**{"launch.folder": "$NOT_SET/runs"}).to_yaml(tmp_path / "mine.yaml")
    button = CheckButton(RunForm(str(tmp_path / "mine.yaml")))
    button.press()
    until(lambda: button.button.description == "Check this machine", words=lambda: button.result.value)
    assert "the variable NOT_SET is not set" in button.result.value and not button.busy


def test_a_job_that_was_promised_gpus_and_sees_none_is_wrong():
    asked = {"train.device": "auto", "launch.gpus_per_node": 1}
    given = {"environment": {"SLURM_GPUS_ON_NODE": "1"}}
    line = lines(rank(0, node=given), rank(1, node=given), **asked)["GPUs of ranks"]
    assert (
        line.level == "wrong" and "sees 0 of 1, and the job has 1" in line.message and "is a build for CPUs" in line.fix
    )


def test_a_folder_is_probed_where_it_is_or_will_be(tmp_path):
    assert probe(str(tmp_path / "not/yet"))["error"] == ""
    assert not list(tmp_path.iterdir()), "nothing is left behind"
    (tmp_path / "file").touch()
    assert "Not a directory" in probe(str(tmp_path / "file/runs"))["error"]
    assert place_line(SHM, {"path": "/dev/shm", "free": 64 << 20}).level == "note"
    assert place_line(SHM, {"path": "/dev/shm", "free": 1 << 20}).level == "wrong"


def test_figures_of_a_machine_are_those_by_which_a_plan_counts_seconds(tmp_path):
    """Two nodes of two ranks each. Seconds of an ideal ring with known rates give these rates back."""
    full, inside, between, latency = 32 << 20, 4e9, 1e9, 1e-4
    small = {"bytes": 4096, "all_gather_s": 2 * latency, "reduce_scatter_s": 2 * latency}
    seconds = full / 2 / 2 / between
    large = {"bytes": full, "all_gather_s": seconds, "reduce_scatter_s": seconds}
    of_node = {"bytes": full, "all_gather_s": full / 2 / inside, "reduce_scatter_s": full / 2 / inside}
    found = {"backend": "nccl", "ranks": 4, "local_ranks": 2, "all": [small, large], "inside": [small, of_node]}
    figures = machine_figures(found)
    assert "  gpus_per_node: 2\n" in machine_block(figures, "")
    assert figures == pytest.approx({"bandwidth": between, "inside": inside, "latency": latency, "gpus_per_node": 2})
    profile = tmp_path / "lab.yaml"
    write_machine(profile, machine_block(figures, "four ranks\npartition: evil"))
    params = RunParams().change(**{"launch.executor": "slurm", "launch.cluster": str(profile), "launch.ranks": 4})
    machine = machine_of_run("a100-infiniband", params)
    assert read_cluster(str(profile)).launch.partition is None, "the comment stays one"
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    plan = make_plan(model, FSDPParams(), world_size=4)
    wire = CollectiveCount("all-gather", "forward", 1, full, ring_bytes("all-gather", full, 4))
    _, _, predicted = sent_seconds(plan, wire, machine)
    assert predicted == pytest.approx(seconds + 2 * latency)
    with pytest.raises(ParamError, match="already has a machine: block; replace it with: # Measured"):
        write_machine(profile, machine_block(figures, ""))
    slow = bandwidth_line(found, figures, params.change(**{"launch.cluster": None}), "NVIDIA A100-SXM4-80GB")
    assert slow.level == "note" and "a100-infiniband has bandwidth 2.5e+10, measured 1e+09" in slow.message
    assert bandwidth_line(found, figures, params, "NVIDIA A100-SXM4-80GB").level == "ok", "as the profile says"


def test_the_table_of_a_check_names_a_place_once_and_has_a_column_for_fixes_where_there_is_one():
    lines = (Line("ok", "python", "3.11"), Line("ok", "cores", "2"), Line("ok", "gloo", "ranks talk"))
    report = SiteReport(lines=lines, places=("here", "here", "2 ranks"))
    assert report.table().count(">here<") == 1 and "what to do" not in report.table()
    wrong = replace(report, lines=(*lines[:2], Line("wrong", "gloo", "silence", "name the interface")))
    assert "what to do" in wrong.table() and "name the interface" in wrong.table()


def test_hostile_words_stay_text():
    line = Line("wrong", f"check {HOSTILE}", HOSTILE, HOSTILE)
    report = SiteReport(lines=(line,), places=(HOSTILE,), folder=HOSTILE)
    assert "\x1b" not in str(report) + repr(report) and "title" not in str(report)
    html = report._repr_html_()
    assert "<img" not in html and "&lt;img" in html and "\x1b" not in html


def test_gpus_that_emulate_bf16_are_told_to_a_run_that_computes_in_it():
    def told(bf16, precision):
        gpus = [{"name": "Tesla T4", "memory": 1.6e10, "uuid": "u", "bf16": bf16}]
        ranks = [rank(number, torch={"gpus": gpus}) for number in range(2)]
        changes = {"train.device": "auto", "launch.gpus_per_node": 1, "fsdp.mixed_precision": precision}
        return lines(*ranks, **changes)["GPUs of ranks"]

    assert told(False, "bf16").level == "note" and "Tesla T4 has no units for bf16" in told(False, "bf16").message
    assert told(False, "fp16").level == told(True, "bf16").level == "ok"


def test_damaged_facts_are_lines_too():
    """Facts of a node with another version of mmfsdp, or of a file that was cut: no line is an error of ours."""
    rows = [{"bytes": size, "all_gather_s": 0.1, "reduce_scatter_s": 0.2} for size in (4096, 1 << 20)]
    band = {"backend": "gloo", "ranks": 2, "local_ranks": 1, "all": rows, "inside": rows}
    gpus = [{"name": "H100", "memory": 8e10, "uuid": "u"}]
    good = rank(0, torch={"gpus": gpus}) | {"bandwidth": band}
    assert "a rank sends, in GB/s" in lines(facts_of(good), facts_of(rank(1)))["bandwidth"].message
    for damaged in cases(good, 500):
        facts = facts_of(damaged)
        told = lines(facts, facts_of(rank(1)), **{"train.device": "auto", "launch.gpus_per_node": 1})
        assert {"versions", "GPUs of ranks", "run folder", "hub", "address", "gloo", "nccl"} <= told.keys()
        assert max(len(str(line)) for line in told.values()) < 20_000
        figures_of({0: facts})
