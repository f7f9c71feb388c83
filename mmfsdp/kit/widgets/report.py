"""report.html of a run: one file that fetches nothing, made from the run folder alone; and its captions in a cell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets as w
import yaml

from ...params.findings import UNKNOWN_WORDS
from ...params.in_words import size
from ..run.files.folder import (
    MAX_METRICS_BYTES,
    best_words,
    read_events,
    read_json,
    read_params_yaml,
    read_result,
    write_text,
)
from ..run.files.history import read_moments, stage_seconds
from ..run.files.plan_file import PLAN_FILE, planned_after, plans_by_begin
from ..run.files.run_record import RunRecord
from ..run.files.snapshot import Snapshot
from ..run.state import run_state
from ..run.trouble import headline, troubles
from .banner import banner
from .cell import import_lock
from .charts.charts_page import charts_html
from .gpu_table import gpu_table
from .learning import learning_section, marked, picture_tag
from .markup import key_figures, note, page, rect, svg, table, text, ticks, width_of
from .pictures.rank_picture import WIDTH
from .report_plan import facts, plan_sections
from .static_files import play_head_script
from .style import FROZEN, GATHERED, INK, REDUCED, STYLE

Row = Mapping[str, Any]
"""A line of metrics.jsonl."""
NEWEST_EVENTS = 6
MAX_PARENT = 500
"""Letters that are shown of the run that another one began with."""
SKIPPED_NAMES = 5
"""Names of skipped records that are shown for each source."""


SPLITS = {
    "heldout": "New pictures of combinations that the training has shown:",
    "unseen": "Combinations of count, size, color and shape that no training has ever shown in a picture:",
}


def write_report(folder: str | Path) -> Path:
    """Write report.html into a run folder and return its path. Parts that the run does not have yet are left out."""
    path = Path(folder) / "report.html"
    write_text(path, report_html(folder))
    return path


def report_html(folder: str | Path) -> str:
    """Return the report as a self-contained HTML page."""
    folder = Path(folder)
    params = read_params(folder)
    planned = read_json(folder / PLAN_FILE) or {}
    result = read_result(folder)
    look = Snapshot(folder, last_bytes=MAX_METRICS_BYTES)
    state = run_state(look)  # first: what is read after the end is all there is
    rows, record = look.rows(), look.record
    newest = planned_after(planned, rows[-1].get("step", 1) - 1 if rows else 0)
    estimate = newest.get("estimate") or {}
    sections: dict[str, Callable[[], str]] = {
        "": lambda: result_figures(result) + parent_line(params, result) + facts(params, planned, record, rows),
        "Captions of new pictures": lambda: caption_cards(folder),
        "Watch it learn": lambda: learning_section(folder),
        "Skipped data": lambda: "".join(note(line) for line in skipped_lines(result)),
        "Training": lambda: training_charts(folder, params.get("train", {}).get("steps"), result),
        "Predicted beside measured": lambda: predicted_beside_measured(estimate, result, rows),
        "GPUs": lambda: gpu_table(folder, record.ranks if record else 1),
        "Profile of a step": lambda: profiles(folder),
        "Plan": lambda: plan_sections(plans_by_begin(planned), params, result, rows),
        "Parameters": lambda: parameters(folder, params, planned.get("versions") or {}),
    }
    found = troubles(look, state)
    body = note(headline(state, found)) + banner(found)
    for title, section in sections.items():
        try:
            html = section()
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, OSError) as error:
            why = f"{type(error).__name__}: {error}"[:200]
            html = note(f"cannot be shown: a file of the run is damaged ({why})", "warning")
        if html:
            heading = f"<h2>{title}</h2>" if title else ""
            body += f"<section>{heading}{html}</section>"
    return page(folder.resolve().name, body + play_head_script())


def show_captions(path: str | Path) -> w.HTML:
    """Return six pictures of each split with caption and truth, and write report.html.

    The first call loads the newest checkpoint and makes the captions. Raises FileNotFoundError where the run has no
    result yet.
    """
    path = Path(path)
    result = read_json(path / "result.json")
    if result is None:
        raise FileNotFoundError(f"{path} has no result yet: {run_state(path)}")
    if "captions" not in result:
        with import_lock:
            from ..train.evaluate import caption_held_out
        result = caption_held_out(path)
    write_report(path)
    return w.HTML(STYLE + result_figures(result) + caption_cards(path, max_cards=6))


def read_params(folder: Path) -> dict[str, Any]:
    """Return params.yaml as it stands; empty where it is missing or damaged, and for a link: it may lead anywhere."""
    if (folder / "params.yaml").is_symlink():
        return {}
    try:
        return read_params_yaml(folder)
    except (OSError, ValueError):
        return {}


def result_figures(result: Mapping[str, Any]) -> str:
    """Return the few numbers that a run is remembered by."""
    shares = {
        "heldout_exact_match": "new pictures right, word for word",
        "unseen_combination_exact_match": "right on never-seen combinations",
        "text_only_exact_match": "right with the picture blanked",
    }
    figures = [(f"{result[key]:.0%}", label) for key, label in shares.items() if key in result]
    if best_words(result.get("best")):
        best = result["best"]
        figures.append((f"{best['score']:.4g}", f"best {best['name'].removeprefix('-')[:40]}, at step {best['step']}"))
    if "frozen_parameters_changed" in result:
        figures.append((str(result["frozen_parameters_changed"]), "frozen parameters changed"))
    if "seconds" in result:
        figures.append((f"{result['seconds']:,.0f} s", f"on {result.get('world_size', '?')} ranks, captions included"))
    return key_figures(figures)


def parent_line(params: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """Return the run with whose weights this one began, as a line; "" if it began with those of the model."""
    start = params.get("train", {}).get("start_from")
    words = result.get("began_with") or (f"begins with the weights of {start}" if start else "")
    return note(words[:MAX_PARENT]) if words else ""


def caption_cards(folder: Path, *, max_cards: int = 12) -> str:
    """Return the first pictures of each split with the caption, and the truth where the caption is wrong."""
    result = read_result(folder)
    rows = result.get("captions", [])
    html = note(result["no_captions"][:300]) if "no_captions" in result else ""
    if rows:
        html += "".join(note(notice, "warning") for notice in Snapshot(folder).notices if notice.code == UNKNOWN_WORDS)
    by_split = {split: [row for row in rows if row.get("split") == split] for split in SPLITS}
    for split, of_split in by_split.items():
        cards = [_card(folder, row) for row in of_split]
        if cards:
            # Only data that keep combinations back, such as the shapes, have others that the training has shown.
            title = SPLITS[split] if by_split["unseen"] else "New pictures:"
            html += f'{note(title)}<div class="mm-cards">{"".join(cards[:max_cards])}</div>'
    return html


def _card(folder: Path, row: Mapping[str, str]) -> str:
    caption, truth = row.get("caption", "?"), row.get("truth", "?")
    words = escape(marked(caption, truth))
    if caption != truth:
        words += f'<br><span class="mm-quiet">truth: {escape(truth)}</span>'
    return f'<figure class="mm-card">{picture_tag(folder, row)}<figcaption>{words}</figcaption></figure>'


def skipped_lines(result: Mapping[str, Any]) -> list[str]:
    """Return what the data could not use, by source, with the first names and reasons."""
    lines = []
    for source in result.get("skipped", {}).values():
        if source["records"] or source["cut"]:
            records, cut = source["records"], source["cut"]
            at_least = "at least " if source.get("at_least") else ""
            lines.append(f"{source['path']}: {at_least}{records} records skipped, {cut} texts cut to data.max_length")
        for name, reason in list(source["reasons"].items())[:SKIPPED_NAMES]:
            lines.append(f"  skipped {name!r}, which {reason}")
    return lines


def training_charts(folder: Path, steps: int | None, result: Mapping[str, Any]) -> str:
    """Return the curves of a run of so many steps, with what was predicted, and its newest events in words.

    The peak was predicted for the batch that was measured, so it is known with the result.
    """
    predicted = {"memory_bytes": (result.get("peak") or {}).get("bytes")}
    return charts_html([folder], total=steps, predicted=predicted) + newest_events(folder) + stages_of_rank0(folder)


def stages_of_rank0(folder: Path) -> str:
    """Return how long each stage of rank 0 took since it was last started, in a line."""
    stages = [f"{words} {seconds:.1f} s" for words, seconds in stage_seconds(read_moments(folder))]
    return note(f"rank 0: {', '.join(stages)}") if stages else ""


def newest_events(folder: Path) -> str:
    """Return the newest events of a run as a list, but for the one that ended it, which the banner tells."""
    events = read_events(folder)
    if events and events[-1]["kind"] == "failed":
        events.pop()
    items = ""
    for event in events[-NEWEST_EVENTS:]:
        items += f"<li>step {event['step']}, {escape(str(event.get('text', '')))}</li>"
    return f'<ul class="mm-quiet">{items}</ul>' if items else ""


def predicted_beside_measured(estimate: Mapping[str, Any], result: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Return tables of the predicted and measured traffic and peak memory of a step, for rank 0."""
    if not estimate or not rows:
        return ""
    predicted, measured = estimate["wire_bytes"], result.get("wire_bytes_measured", rows[-1].get("wire_bytes"))
    lines: list[list[object]] = [["sent in a step", "", "", *_pair(predicted, measured)]]
    collectives: dict[tuple[str, str], list[Row]] = {}
    none = {"count": 0, "wire_bytes": 0}
    for index, items in enumerate((estimate["wire"], result.get("wire_measured", []))):
        for item in items:
            collectives.setdefault((item["kind"], item["phase"]), [none, none])[index] = item
    if result.get("wire_measured"):
        for (kind, phase), (planned, counted) in sorted(collectives.items()):
            both = _pair(planned["wire_bytes"], counted["wire_bytes"])
            lines.append([f"{kind} in {phase}", planned["count"], counted["count"], *both])
    peak = result.get("peak")
    if peak:
        about = f"peak memory, in {peak['when']}; of the largest batch that ran"
        lines.append([about, "", "", *_pair(peak["bytes"], rows[-1].get("memory_bytes"))])
    if "reserved_bytes" in rows[-1]:  # on a GPU
        about = "reserved by the GPU's allocator, with what it keeps of freed memory"
        lines.append([about, "", "", "", size(rows[-1]["reserved_bytes"]), ""])
    if rows[-1].get("alloc_retries"):
        about = "allocations that had to wait until the allocator gave back what it kept: too little memory is free"
        lines.append([about, "", rows[-1]["alloc_retries"], "", "", ""])
    head = ["rank 0", "calls predicted", "calls measured", "bytes predicted", "bytes measured", "difference"]
    return table(head, lines)


def _pair(predicted: float, measured: float | None) -> tuple[object, object, str]:
    """Return both and their difference as cells of a row; nothing is said of what was not measured."""
    if measured is None:
        return size(predicted), "", ""
    difference = f"{(measured - predicted) / (predicted or 1):+.1%}" if measured != predicted else "equal"
    return size(predicted), size(measured), difference


def profiles(folder: Path) -> str:
    """Return a timeline of each rank that was profiled."""
    html = ""
    for path in sorted((folder / "profile").glob("rank*.json")):
        profile = read_json(path)
        if profile:
            parts = [f"{path.stem} on {profile['host']}: a step of {profile['seconds']:.3g} s"]
            for key in ("compute", "communication", "exposed"):
                parts.append(f"{key} {profile[f'{key}_s']:.3g} s")
            html += timeline(profile["lanes"], seconds=profile["seconds"], title=", ".join(parts))
    return html + note("exposed: communication with no compute at the same time.") if html else ""


def timeline(lanes: Mapping[str, Sequence[Sequence[float]]], *, seconds: float, title: str) -> str:
    """Return a step as bars over time, a row for each kind of work, compute first.

    lanes: intervals (start, end) in seconds from the beginning of the step, by kind. seconds: length of the step.
    """
    colors = {"compute": FROZEN, "all-gather": GATHERED}
    kinds = sorted(lanes, key=lambda kind: (kind != "compute", kind))
    lane_height, left = 30, 16.0
    for kind in kinds:
        left = max(left, 1.15 * width_of(kind, 12) + 16)
    pixels_per_second = (WIDTH - left - 44) / (seconds or 1.0)
    parts, totals = [text(8, 18, title, size=13)], []
    for index, kind in enumerate(kinds):
        top = 30 + lane_height * index
        parts.append(text(left - 8, top + 17, kind, size=12, anchor="end"))
        parts.append(rect(left, top + lane_height - 6, seconds * pixels_per_second, 1, INK))
        busy_s = 0.0
        for start, end in lanes[kind]:
            start, end = max(start, 0.0), min(end, seconds)
            busy_s += end - start
            length = max((end - start) * pixels_per_second, 0.5)
            color = colors.get(kind, REDUCED)  # all other kinds reduce
            parts.append(rect(left + start * pixels_per_second, top, length, lane_height - 8, color))
        totals.append(f"{kind} {busy_s:.3g} s")
    bottom = 34 + lane_height * len(kinds)
    for second in ticks(0, seconds, 6):
        parts.append(text(left + second * pixels_per_second, bottom + 12, f"{second * 1e3:.4g} ms", anchor="middle"))
    return svg(WIDTH, bottom + 22, f"{title}: {'; '.join(totals)}", *parts)


def parameters(folder: Path, params: Mapping[str, Any], libraries: Mapping[str, str]) -> str:
    """Return all parameters, with the versions that are needed to make the run again."""
    record = RunRecord.read(folder)
    versions = {"mmfsdp": record.version if record else "", **libraries}
    words = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    html = note(f"made with {words}") if words else ""
    if params:
        text = escape(yaml.safe_dump(dict(params), sort_keys=False))
        html += f"<details><summary>all of them, as params.yaml</summary><pre>{text}</pre></details>"
    return html
