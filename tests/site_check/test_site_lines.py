"""Lines of a check made from facts: what somebody else has written stays text in a terminal and on a page."""

from mmfsdp.checks.lines import Line
from mmfsdp.params import RunParams
from mmfsdp.site_check.check import SiteReport
from mmfsdp.site_check.judge import Asked, rank_lines
from mmfsdp.site_check.places import SHM, probe
from mmfsdp.site_check.this_machine import place_line

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


def lines(*ranks, **changes):
    """The lines on these ranks of a Slurm job, by their check."""
    values = {"launch.executor": "slurm", "launch.ranks": 2, "launch.nodes": 2, "train.device": "cpu"}
    versions = {"torch": "2.14", "transformers": "5.0", "mmfsdp": "1"}
    asked = Asked(RunParams().change(**values | changes), 2, "t", versions)
    return {line.check: line for line in rank_lines(asked, dict(enumerate(ranks)))}


def test_nothing_is_wrong_where_nothing_is():
    assert {line.state for line in lines(rank(0), rank(1)).values()} == {"ok"}


def test_what_a_rank_finds_is_told_with_its_node_by_the_line_that_is_for_it():
    for check, (words, fix), faulty in (
        (
            "versions",
            ("torch is 2.14 on rank 0 on node0, 2.9 on rank 1", "launch.python"),
            {"torch": {"version": "2.9"}},
        ),
        ("run folder", ("does not read what this machine", "that all nodes share"), {"folders": {"token": ""}}),
        (
            "address",
            ("rank 1 on node1: no rank reaches it", "set it"),
            {"address": {"error": "no rank reaches it; set it"}},
        ),
        ("gloo", ("rank 1 on node1: timed out", "launch.interface"), {"gloo": {"error": "timed out"}}),
        ("nccl", ("rank 1 on node1 was ended in it", "NCCL_DEBUG"), {"doing": "nccl"}),
    ):
        found = lines(rank(0), rank(1, **faulty))
        assert [name for name, line in found.items() if line.state == "wrong"] == [check], found
        assert words in found[check].text and fix in found[check].fix, found[check]
    clocks = lines(rank(0, gloo={"times": [0.0, 90.0]}), rank(1))["clocks"]
    assert clocks.state == "wrong" and "90.0 s" in clocks.text


def test_a_job_that_was_promised_gpus_and_sees_none_is_wrong():
    asked = {"train.device": "auto", "launch.gpus_per_node": 1}
    given = {"environment": {"SLURM_GPUS_ON_NODE": "1"}}
    line = lines(rank(0, node=given), rank(1, node=given), **asked)["GPUs of ranks"]
    assert line.state == "wrong" and "the job has given 1" in line.text and "is a build for CPUs" in line.fix


def test_a_folder_is_probed_where_it_is_or_will_be(tmp_path):
    assert probe(str(tmp_path / "not/yet"))["error"] == ""
    assert not list(tmp_path.iterdir()), "nothing is left behind"
    (tmp_path / "file").touch()
    assert "Not a directory" in probe(str(tmp_path / "file/runs"))["error"]
    assert place_line(SHM, {"path": "/dev/shm", "free": 64 << 20}).state == "note"
    assert place_line(SHM, {"path": "/dev/shm", "free": 1 << 20}).state == "wrong"


def test_hostile_words_stay_text():
    line = Line(f"check {HOSTILE}", "wrong", HOSTILE, HOSTILE)
    report = SiteReport(lines=(line,), places=(HOSTILE,), folder=HOSTILE)
    assert "\x1b" not in str(report) + repr(report) and "title" not in str(report)
    html = report._repr_html_()
    assert "<img" not in html and "&lt;img" in html and "\x1b" not in html
