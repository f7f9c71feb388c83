"""Charts without a browser: what is read, what a page is sent, and the pictures where no page asks."""

import json
import math
import time
from xml.etree import ElementTree

import pytest

from mmfsdp.kit.run.files.breaks import breaks_of
from mmfsdp.kit.run.files.folder import MetricsWriter, add_event
from mmfsdp.kit.widgets.charts import charts as charts_module
from mmfsdp.kit.widgets.charts.chart_data import Columns
from mmfsdp.kit.widgets.charts.chart_table import charts_of
from mmfsdp.kit.widgets.charts.charts import Charts
from mmfsdp.kit.widgets.charts.charts_page import charts_html
from mmfsdp.kit.widgets.charts.static_chart import Curve, draw, static_charts

HOSTILE = "<script>alert('$x$ &')</script>"


def write(folder, rows):
    """Append rows of steps to a run's metrics."""
    folder.mkdir(exist_ok=True)
    writer = MetricsWriter(folder)
    for row in rows:
        writer.write({"time": 1e9 + (row.get("step") or 0) / 10} | row)


def read(folder):
    columns = Columns(folder)
    columns.read(all_of_it=True)
    return columns


def asked(charts, **request):
    """The answer to a question of the page."""
    answers, send = [], charts.live.send
    charts.live.send = answers.append
    charts.live._handle_custom_msg({"ask": {"request": 7, "pixels": 600} | request}, [])
    charts.live.send = send
    (answer,) = answers
    return json.loads(json.dumps(answer, allow_nan=False))


def table(answer):
    (only,) = answer["tables"]
    return only


def test_a_spike_of_one_step_in_thousands_is_in_what_a_page_is_sent(tmp_path):
    n = 20_000
    write(tmp_path, [{"step": step, "loss": 40.0 if step == 7001 else 1 + step / n} for step in range(1, n + 1)])
    columns = read(tmp_path)
    thin = columns.table(300)
    assert thin["bucket"] == 128 and 300 / 2 <= len(thin["step"]) <= 2 * 300
    assert max(thin["values"]["loss"]) == 40.0 and min(thin["values"]["loss"]) == pytest.approx(1 + 1 / n)
    at = thin["values"]["loss"].index(40.0)
    assert abs(thin["step"][at] - 7001) <= thin["bucket"]
    assert thin["step"] == sorted(thin["step"]) and (thin["step"][0], thin["step"][-1]) == (1, n)
    part = columns.table(300, low=6990, high=7010)
    assert part["bucket"] == 1 and part["values"]["loss"][part["step"].index(7001)] == 40.0
    by_time = columns.table(300, x="time", low=699.0, high=701.0)
    assert 7001 in by_time["step"] and len(by_time["step"]) < 30


def test_the_least_and_the_largest_value_of_a_pixel_stand_in_the_order_in_which_they_came(tmp_path):
    losses = [1.0, 9.0, 5.0, 5.0] + [9.0, 1.0, 5.0, 5.0] + [5.0, 5.0, 9.0, 1.0]
    grad_norms = [None, *losses[1:]]  # a metric that the first row lacks
    rows = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    for row, grad_norm in zip(rows, grad_norms, strict=True):
        if grad_norm is not None:
            row["grad_norm"] = grad_norm
    write(tmp_path, rows)
    thin = read(tmp_path).table(3)
    assert thin["bucket"] == 4 and thin["step"] == [1, 4, 5, 8, 9, 12]
    assert thin["values"]["loss"] == [1.0, 9.0, 9.0, 1.0, 9.0, 1.0]
    assert thin["values"]["grad_norm"] == [9.0, 5.0, 9.0, 1.0, 9.0, 1.0]


def test_only_what_is_new_is_read_and_sent(tmp_path):
    write(tmp_path, [{"step": step, "loss": 1.0} for step in range(1, 1001)])
    charts = Charts(tmp_path)
    page = table(asked(charts, pixels=100))
    assert (page["bucket"], page["at"], page["end"]) == (16, 0, 1000)
    have = {tmp_path.name: {key: page[key] for key in ("epoch", "bucket", "first", "end")}}
    assert len(table(asked(charts, pixels=100, have=have))["step"]) <= 2
    write(tmp_path, [{"step": step, "loss": 2.0} for step in range(1001, 1011)])
    news = table(asked(charts, pixels=100, have=have))
    assert news["at"] == 2 * (1000 // 16) and news["end"] == 1010
    joined = page["step"][: news["at"]] + news["step"]
    assert joined == table(asked(charts, pixels=100))["step"], "a page that asks for what is new has all of it"
    write(tmp_path, [{"step": step, "loss": 2.0} for step in range(1011, 3001)])
    anew = table(asked(charts, pixels=100, have=have))
    assert (anew["at"], anew["bucket"]) == (0, 32), "wider buckets: all points anew"
    charts.close()


def test_half_a_row_is_read_when_it_is_whole_and_a_resumed_run_begins_anew(tmp_path):
    write(tmp_path, [{"step": step, "loss": 1.0} for step in (1, 2)])
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 3, "lo')
    columns = read(tmp_path)
    assert columns.rows == 2
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'ss": 0.5}\n{"step": 3, "loss": 9}\n')
    columns.read()
    assert columns.rows == 3 and columns.newest("loss") == 0.5, "a step that does not follow is left out"
    epoch = columns.epoch
    MetricsWriter(tmp_path, after=1).write({"step": 2, "loss": 0.25})
    columns.read()
    assert (columns.rows, columns.newest("loss")) == (2, 0.25) and columns.epoch > epoch


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_a_gap_and_never_0(tmp_path, bad):
    rows = [{"step": step, "loss": 3.0 / step} for step in range(1, 11)]
    rows[4]["loss"] = bad
    write(tmp_path, rows)
    columns = read(tmp_path)
    assert columns.table(600)["values"]["loss"][4] == "nan"
    assert "nan" in columns.table(3)["values"]["loss"], "also where a point stands for many rows"
    svg = static_charts({"a": columns.table(600)})
    assert svg.count('stroke="#8250DF"') == 2, "before the gap, and after it"
    write(tmp_path, [{"step": 11, "loss": bad}])
    columns.read()
    assert "loss. training: 3 at first, not finite now" in static_charts({"a": columns.table(600)})


def test_odd_rows_and_unknown_metrics_do_no_harm(tmp_path):
    odd = [
        {},
        {"step": 1, "loss": None},
        {"step": 2, "own": 3.0, "loss": 10**400, "lr": "high"},
        {"step": None, "loss": 1.0},
    ]
    odd += [{"step": 3, "loss": 1.0, HOSTILE: 1.0, "lr " + HOSTILE: 0.1, "scores": {HOSTILE: 0.5}}]
    write(tmp_path, odd)
    charts = Charts(tmp_path)
    answer = asked(charts, pixels="many", low="x", high=None, have=[1], x="y")
    assert [chart["title"] for chart in answer["charts"]] == ["loss", "learning rate", HOSTILE]
    assert table(answer)["values"]["loss"] == [None, None, 1.0]
    for message in (None, [], {"ask": 3}, {}):
        charts.live._handle_custom_msg(message, [])
    html = charts_html([tmp_path])
    assert "<script>alert" not in html and "\\u003cscript>alert" in html
    ElementTree.fromstring(static_charts({"a": read(tmp_path).table(300)}))
    assert charts_html([tmp_path / "none"]) == ""
    charts.close()


def test_each_metric_has_its_chart_and_only_what_was_measured_is_drawn():
    assert [chart.title for chart in charts_of({"loss", "mfu", "gpu_use"})] == ["loss", "throughput", "GPU use"]
    keys = {"heldout_loss", "loss", "lr", "lr vision.*", "memory_bytes", "scores.vqa"}
    loss, memory, rate, own = charts_of(keys)
    assert [line.label for line in loss.lines] == ["training", "held-out"]
    assert [line.label for line in rate.lines] == ["rate", "vision.*"] and own.title == "vqa"
    assert memory.lines[0].unit == "bytes"


def test_a_page_that_does_not_ask_gets_pictures_until_it_asks(tmp_path, monkeypatch):
    write(tmp_path, [{"step": step, "loss": 1 / step, "memory_bytes": 5 << 20} for step in range(1, 6)])
    charts = Charts(tmp_path, total=5, predicted={"memory_bytes": 8 << 20})
    charts.draw()
    assert charts.pictures.value == "", "the page may still ask"
    monkeypatch.setattr(charts_module, "NO_ANSWER_S", 0.0)
    charts.draw()
    words = charts.pictures.value
    assert "pip install anywidget" in words and "predicted 8 MiB" in words
    assert "training: 1 at first, 0.2 now" in words
    asked(charts, heard=True)
    assert charts.pictures.value == ""
    charts.draw()
    assert charts.pictures.value == "", "it has just asked"
    charts.close()


def ask_and_wait(charts):
    """The page asks, and long after that nothing has been heard of it. No timer draws beside the test."""
    asked(charts)
    for timer in charts.timers:
        timer.cancel()
    charts.born -= 1000
    if charts.unheard_since is not None:
        charts.unheard_since -= 1000
    charts.draw()


def test_a_page_that_asks_but_gets_no_answers_is_given_its_charts_anew_until_it_hears(tmp_path):
    write(tmp_path, [{"step": step, "loss": 1 / step} for step in range(1, 6)])
    charts = Charts(tmp_path, total=5)
    first = charts.live
    ask_and_wait(charts)
    assert charts.live is not first and charts.live.spec == first.spec and first.comm is None, "another in its place"
    assert "too busy to load" in charts.pictures.value and "pip install" not in charts.pictures.value
    for _ in range(20):
        ask_and_wait(charts)
    assert charts.renewals == charts_module.MAX_RENEWALS, "not for ever"
    asked(charts)
    charts.live._handle_custom_msg({"heard": True}, [])
    assert charts.pictures.value == ""
    heard = charts.live
    charts.draw()
    assert charts.live is heard
    charts.close()


def test_a_reload_needs_little_and_nothing_is_sent_unasked(tmp_path):
    write(tmp_path, [{"step": step, "loss": 1.0, "grad_norm": 1.0} for step in range(1, 2001)])
    charts = Charts(tmp_path)
    sent = []
    charts.live.send = sent.append
    write(tmp_path, [{"step": 2001, "loss": 1.0}])
    charts.draw()
    state = charts.live.get_state()
    assert len(json.dumps({name: value for name, value in state.items() if name != "layout"}, default=str)) < 200_000
    assert sent == []
    charts.close()


def test_a_large_run_is_drawn_again_at_the_cost_of_what_is_new(tmp_path):
    line = '{"step": %d, "time": 1e9, "loss": 1.5, "grad_norm": 0.5, "lr": 0.1, "samples_per_s": 90.5}\n'
    tmp_path.joinpath("metrics.jsonl").write_text("".join(line % step for step in range(1, 100_001)))
    charts = Charts(tmp_path)
    while (answer := asked(charts))["more"]:
        pass
    page = table(answer)
    assert page["rows"] == 100_000
    have = {tmp_path.name: {key: page[key] for key in ("epoch", "bucket", "first", "end")}}
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(line % 100_001)
    start = time.thread_time()
    news = asked(charts, have=have)
    print(f"{1e3 * (time.thread_time() - start):.1f} ms for one new row of 1e5")
    assert len(table(news)["step"]) <= 2 and len(json.dumps(news)) < 3000
    charts.close()


def test_the_page_of_a_report_is_small(tmp_path):
    write(tmp_path, [{"step": i, "loss": 1 / i, "grad_norm": i / 7, "memory_bytes": 7 << 20} for i in range(1, 5001)])
    html = charts_html([tmp_path], total=5000, predicted={"memory_bytes": 9 << 20})
    assert len(html) < 200_000 and "http" not in html.replace("http://www.w3.org/2000/svg", "").replace(
        "https://github.com/leeoniya/uPlot", ""
    )


def test_a_curve_shows_where_its_run_stopped_and_which_steps_ran_again(tmp_path):
    write(tmp_path, [{"step": step, "loss": 1 / step} for step in range(1, 24)])
    charts = Charts(tmp_path)
    assert table(asked(charts))["breaks"] == []
    add_event(tmp_path, "killed", step=23, text=HOSTILE, rank=1)
    add_event(tmp_path, "failed", step=24, text=HOSTILE)
    (stopped,) = table(asked(charts))["breaks"]
    assert stopped == {"stopped": 24, "resumed": None, "words": "rank 1 was killed at step 23"}

    add_event(tmp_path, "resumed", step=20, text=HOSTILE)
    MetricsWriter(tmp_path, after=20).write({"step": 21, "time": 2e9, "loss": 0.5})
    (resumed,) = table(asked(charts))["breaks"]
    charts.close()
    words = "rank 1 was killed at step 23, resumed from step 20: steps 21 to 24 ran again"
    assert resumed == {"stopped": 24, "resumed": 20, "words": words}
    html = charts_html([tmp_path])
    svg = html[html.index("<svg") : html.index("</svg>") + 6]
    dashed = [e for e in ElementTree.fromstring(svg).iter() if e.get("stroke-dasharray") == "3 3"]
    assert len(dashed) == 1 and svg.count("<rect") == 1 and words in html and HOSTILE not in html
    other = tmp_path / "other"
    write(other, [{"step": 1, "loss": 1.0}])
    assert words not in charts_html([tmp_path, other]), "of runs side by side nobody could tell whose it is"


def test_breaks_are_told_by_events_and_the_time_of_the_first_row():
    def words(*kinds, **options):
        events = [{"kind": kind, "step": step, "time": float(i)} for i, (kind, step) in enumerate(kinds)]
        return [each.words for each in breaks_of(events, **options)]

    preempted = words(
        ("saved", 10), ("drill", 11), ("preempted", 12), ("requeued", 12), ("resumed", 12), ("failed", 30)
    )
    assert preempted == ["preempted at step 12, resumed from step 12", "failed at step 30"]
    assert words(("failed", 7), ("resumed", 6)) == ["failed at step 7, resumed from step 6: step 7 ran again"]
    assert words(("failed", 7), first_row=-1.0) == ["failed at step 7"]
    assert words(("failed", 2), first_row=1.0) == ["failed at step 2, resumed from step 0: steps 1 to 2 ran again"]
    assert words(("begun", 0), ("resumed", 5)) == [], "a cancelled run has no event of its end"


def test_lines_of_many_runs_have_a_name_each():
    names = [f"run {i} {HOSTILE}" for i in range(8)]
    svg = draw("loss", [Curve(name, range(1, 4), [3.0, 2.0, 1.0]) for name in names])
    (title,) = (e.text for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("}title"))
    assert all(name in title for name in names) and svg.count('stroke-width="1.6"') == 8


@pytest.mark.parametrize("flat", [0.0, 2.0, -1e30])
def test_a_flat_curve_is_drawn(flat):
    ElementTree.fromstring(draw("loss", [Curve("loss", [1], [flat])]))
