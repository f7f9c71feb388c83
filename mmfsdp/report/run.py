"""report.html of a run: one file that needs nothing else. Also the pieces of it that notebooks show."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import yaml

from .. import runs
from ..plots import History, bars, charts, plan_picture, timeline
from .html import Html, cells, page, table, writable

if TYPE_CHECKING:
    from ..plan import WrapPlan

SPLITS = {
    "heldout": "New pictures of combinations that the training has shown:",
    "unseen": "Combinations of count, size, color and shape that no training has ever shown in a picture:",
}


def write_report(folder: str | Path) -> Path:
    """Write report.html into a run folder and return its path. Parts that the run has not got yet are left out.

    Where that folder is not ours to write in it is NAME-report.html in the current one.
    """
    path = writable(Path(folder) / "report.html")
    runs.write_text(path, report_html(folder))
    return path


def report_html(folder: str | Path) -> str:
    """The report as one HTML page with everything inside it. Reads only the run folder."""
    folder = Path(folder)
    params = read_params(folder)
    plan, cost = _plan(folder)
    result = runs.read_json(folder / "result.json") or {}
    rows, _ = runs.read_metrics(folder)
    history = History()
    history.add(rows)
    parts: list[tuple[str, Callable[[], str]]] = [
        ("", lambda: figures(result)),
        ("What it says about new pictures", lambda: captions(folder)),
        ("What the data lacked", lambda: lacked(result)),
        (
            "The way it went",
            lambda: charts(
                history,
                total=_steps(params),
                predicted=levels(cost, rows[-1] if rows else {}),
                marks=runs.marks(folder),
            ),
        ),
        ("Predicted beside measured", lambda: compared(cost, result, rows)),
        ("Where the seconds go", lambda: seconds_of(folder, rows)),
        ("The plan", lambda: plan_html(plan, cost) if plan else ""),
        (
            "Parameters",
            lambda: made_with(folder) + (_folded(yaml.safe_dump(params, sort_keys=False)) if params else ""),
        ),
    ]
    sections = [(title, _whole(part)) for title, part in parts]
    body = "".join(f"<section><h2>{title}</h2>{html}</section>" for title, html in sections if html)
    state = f'<p class="mm-quiet">{escape(str(runs.run_state(folder)))}</p>'
    return page(folder.resolve().name, state + body)


def _whole(part: Callable[[], str]) -> str:
    """A part of the page; where a damaged file of the run does not give it, that instead."""
    try:
        return part()
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, OSError) as error:
        why = escape(f"{type(error).__name__}: {error}"[:200])
        return f'<p class="mm-warning">cannot be shown: a file of the run is damaged ({why})</p>'


def _steps(params: Mapping[str, Any]) -> int | None:
    train = params.get("train")
    steps = train.get("steps") if isinstance(train, dict) else None
    return steps if isinstance(steps, int) else None


def _folded(text: str) -> str:
    return f"<details><summary>all of them, as params.yaml</summary><pre>{escape(text)}</pre></details>"


def made_with(folder: Path) -> str:
    """Our version, the commit that it was launched from, and the libraries': to make the run again."""
    record, libraries = runs.RunRecord.read(folder), (runs.read_json(folder / "plan.json") or {}).get("versions") or {}
    ours = [f"mmfsdp {record.version}"] + [f"commit {record.commit}"] * bool(record.commit) if record else []
    words = ", ".join([*ours, *(f"{name} {number}" for name, number in libraries.items())])
    return f'<p class="mm-quiet">made with {escape(words)}</p>' if words else ""


def read_params(folder: Path) -> dict[str, Any]:
    """params.yaml as it stands; empty where it is missing or damaged."""
    try:
        values = yaml.safe_load((folder / "params.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}


def _plan(folder: Path) -> tuple[WrapPlan | None, dict[str, Any]]:
    """The plan and its estimate; nothing where they are missing, or of a version that this one cannot read."""
    from ..plan import WrapPlan

    found = runs.read_json(folder / "plan.json") or {}
    try:
        return WrapPlan.from_dict(found["plan"]), dict(found["estimate"])
    except (LookupError, TypeError, ValueError, AttributeError):
        return None, {}


def plan_html(plan: WrapPlan, cost: Mapping[str, Any]) -> str:
    """A plan as picture and table, what it costs each rank, and what the lint has found."""
    from ..plan.table import count, size

    numel, trains = sum(u.numel for u in plan.units), sum(u.trainable_numel for u in plan.units)
    words = (
        f"<p>{plan.backend} on {plan.world_size} ranks: <b>{count(trains)}</b> of {count(numel)} parameters train. "
        f"Each rank holds <b>{size(cost['memory_bytes'])}</b> beside its activations "
        f"and sends <b>{size(cost['wire_bytes'])}</b> a step.</p>"
    )
    return words + findings(plan) + plan_picture(plan) + unit_table(plan)


def findings(plan: WrapPlan) -> str:
    """What the lint has found, and what AUTO has chosen."""
    found = "".join(f'<p class="mm-{f.level}">{escape(f"{f.level}: {f.message}")}</p>' for f in plan.lint)
    return found + (f'<p class="mm-quiet">{escape(plan.why)}</p>' if plan.why else "")


def unit_table(plan: WrapPlan) -> str:
    """Every unit with its parameters, bytes and traffic."""
    from ..plan.table import count, size

    head = ["unit", "kind", "policy", "parameters", "held", "gathered", "gathers", "reduced"]
    rows = []
    for unit in plan.units:
        kind = Html(f'<span class="mm-{unit.kind}">{unit.kind}</span>')
        gathers = f"{unit.gathers_forward} + {unit.gathers_backward}"
        held, gathered, reduced = (
            size(n) if n else "–" for n in (unit.held_bytes, unit.gathered_bytes, unit.reduced_bytes)
        )
        name = Html(re.sub(r"([.,])", r"\1<wbr>", escape(unit.name)))
        rows.append([name, kind, unit.frozen_policy or "", count(unit.numel), held, gathered, gathers, reduced])
    note = "held: at rest, per rank. gathers: all-gathers in forward + backward. reduced: gradients summed over ranks."
    return table(head, rows) + f'<p class="mm-quiet">{note}</p>'


def compared(cost: Mapping[str, Any], result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """What was predicted for a rank and a step, beside what was measured in the last one."""
    if not cost or not rows:
        return ""
    predicted, measured = cost["wire_bytes"], result.get("wire_bytes_measured", rows[-1].get("wire_bytes"))
    picture = bars([("sent", predicted / 2**20, measured / 2**20 if measured is not None else None)], unit="MiB a step")
    lines: list[list[object]] = [
        ["all that rank 0 sends in a step", "", "", predicted, measured, _apart(predicted, measured)]
    ]
    kinds = [{(w["kind"], w["phase"]): w for w in wire} for wire in (cost["wire"], result.get("wire_measured", []))]
    for key in sorted({*kinds[0], *kinds[1]} if kinds[1] else ()):
        said, seen = (of.get(key, {"count": 0, "wire_bytes": 0}) for of in kinds)
        bytes_ = said["wire_bytes"], seen["wire_bytes"]
        lines.append([f"{key[0]} in {key[1]}", said["count"], seen["count"], *bytes_, _apart(*bytes_)])
    if most := cost.get("peak_bytes"):
        held = rows[-1].get("memory_bytes")
        words = f"peak memory of rank 0, in {cost['peak_when']}; predicted for the longest texts"
        lines.append([words, "", "", most, "" if held is None else held, _apart(most, held)])
    head = ["", "calls predicted", "measured", "bytes predicted", "measured", "difference"]
    return picture + table(head, lines) + _step_time(cost.get("times"), rows)


def seconds_of(folder: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """How the run started, and where a profile is: compute and communication of a step."""
    parts: dict[str, float] = next((row["startup"] for row in rows if isinstance(row.get("startup"), dict)), {})
    split = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts.items() if seconds >= 0.05)
    html = f"<p>From launch to the first step: {sum(parts.values()):.1f} s ({escape(split)}).</p>" if parts else ""
    for path in sorted((folder / "profile").glob("rank*.json")):
        if found := runs.read_json(path):
            spent = {"compute": "compute_s", "communication": "communication_s", "nothing beside that": "exposed_s"}
            words = ", ".join(f"{name} {found[key]:.3g} s" for name, key in spent.items())
            title = f"{path.stem} on {found['host']}: a step of {found['seconds']:.3g} s; {words}"
            html += timeline(found["lanes"], seconds=found["seconds"], title=title)
    return html


def _step_time(times: Mapping[str, Any] | None, rows: Sequence[Mapping[str, Any]]) -> str:
    """How long a step was to take, beside the median of those after the first."""
    seen = [row["step_s"] for row in rows[1:] if isinstance(row.get("step_s"), float)]
    if not times or not seen:
        return ""
    took, said = median(seen), [times["step_s"], times["step_s_no_overlap"]]
    cells = [f"{seconds:.3g}" for seconds in (*said, took)]
    held = f"on {times['machine']}, bound by {times['bound']}"
    head = ["", "predicted", "if nothing overlaps", "measured (median)", "difference"]
    return table(head, [[f"seconds of a step, {held}", *cells, _apart(said[0], took)]])


def _apart(predicted: float, measured: float | None) -> str:
    return "" if measured is None else f"{(measured - predicted) / (predicted or 1):+.1%}"


def levels(cost: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, float]:
    """What was predicted of the metrics that are drawn, by their keys. row: any of metrics.jsonl, for its samples."""
    times = cost.get("times")
    step_s = times.get("step_s") if isinstance(times, dict) else None
    rate = row["samples"] / step_s if step_s and row.get("samples") else None
    found = {"memory_bytes": cost.get("peak_bytes"), "step_s": step_s, "samples_per_s": rate}
    return {key: value for key, value in found.items() if value}


def figures(result: Mapping[str, Any]) -> str:
    """The few numbers that a run is remembered by."""
    shares = {
        "heldout_exact_match": "new pictures right, word for word",
        "unseen_combination_exact_match": "right on never-seen combinations",
        "text_only_exact_match": "right with the picture blanked",
    }
    shown = [(f"{result[key]:.0%}", words) for key, words in shares.items() if key in result]
    if "frozen_parameters_changed" in result:
        shown.append((str(result["frozen_parameters_changed"]), "frozen parameters changed"))
    if "seconds" in result:
        shown.append((f"{result['seconds']:,.0f} s", f"on {result.get('world_size', '?')} ranks, captions included"))
    return cells(shown)


def lacked(result: Mapping[str, Any]) -> str:
    """Records that were skipped and texts that were cut, by source, with the first reasons."""
    found = {name: row for name, row in result.get("skipped", {}).items() if row["times"] or row["cut"]}
    rows = [[row["path"], row["records"], row["times"], row["cut"]] for name, row in found.items()]
    reasons = [f"{name} {why}" for row in found.values() for name, why in list(row["reasons"].items())[:5]]
    note = "".join(f'<p class="mm-quiet">{escape(reason)}</p>' for reason in reasons)
    return table(["source", "records skipped", "times", "texts cut"], rows) + note if rows else ""


def captions(folder: str | Path, *, each: int = 12) -> str:
    """The first pictures of each split with what the model said, and the truth where it was wrong, as HTML."""
    folder = Path(folder)
    rows = (runs.read_json(folder / "result.json") or {}).get("captions", [])
    html = ""
    for split, words in SPLITS.items():
        cards = "".join(_card(folder, row) for row in [r for r in rows if r.get("split") == split][:each])
        html += f'<p class="mm-quiet">{words}</p><div class="mm-cards">{cards}</div>' if cards else ""
    return html


def _card(folder: Path, row: Mapping[str, str]) -> str:
    said, truth = (escape(row.get(key, "?")) for key in ("caption", "truth"))
    words = f"✓ {said}" if said == truth else f'✗ {said}<br><span class="mm-quiet">truth: {truth}</span>'
    picture = _data_uri(folder, row.get("image", ""))
    image = f'<img src="{picture}" alt="{truth}">' if picture else ""
    return f'<figure class="mm-card">{image}<figcaption>{words}</figcaption></figure>'


def _data_uri(folder: Path, name: str) -> str:
    """A picture of the run folder as text; empty if it is missing or lies outside."""
    path = (folder / name).resolve()
    if path.suffix != ".png" or not path.is_relative_to(folder.resolve()) or not path.is_file():
        return ""
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
