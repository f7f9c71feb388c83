"""One palette and one style sheet, for pictures, reports and widgets, on light and on dark pages."""

from __future__ import annotations

FROZEN, TRAINABLE, GATHERED, REDUCED = "#0072B2", "#C45100", "#009E73", "#CC79A7"
"""The four colors of every picture (Okabe and Ito, 2008: told apart with any color vision; their vermilion darker, so
that white text on it can be read). 3:1 on black and white."""
OPTIMIZER, ACTIVATIONS = "#E69F00", "#56B4E9"
"""Two more of theirs, for what is only ever drawn as an area."""
COLORS = (FROZEN, TRAINABLE, GATHERED, REDUCED, "#A6761D", "#4DA3D9")
"""Of lines that are compared, in order."""
INK = "#787878"
"""Lines and axes: a grey that can be seen on white and on JupyterLab's dark ground alike. Text has the page's color."""

STYLE = f"""<style>
.mm-frozen::before, .mm-trainable::before, .mm-mixed::before {{content: ""; display: inline-block; width: .7em;
  height: .7em; margin-right: .35em; background: {FROZEN}}}
.mm-trainable::before {{background: {TRAINABLE}}}
.mm-mixed::before {{background: linear-gradient(135deg, {FROZEN} 50%, {TRAINABLE} 50%)}}
.mm-quiet {{opacity: .8; line-height: 1.35}}
.mm-error, .mm-warning {{font-weight: 600; line-height: 1.35; border-left: 4px solid {TRAINABLE}; padding-left: .5em}}
.mm-warning {{border-color: {OPTIMIZER}; font-weight: inherit}}
.mm-table {{border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 12px}}
.mm-table th, .mm-table td {{padding: .3em .6em; text-align: right; white-space: nowrap; line-height: 1.2;
  border-bottom: 1px solid {INK}55}}
.mm-table th:first-child, .mm-table td:first-child {{text-align: left; white-space: normal}}
.mm-table td:first-child {{min-width: 15em}}
.mm-widget .widget-html-content {{min-width: 0}}
.mm-log {{margin: 0; line-height: 1.3; font-size: 12px}}
.jp-RenderedText pre.mm-log {{white-space: pre; word-break: normal}}
.mm-is-error {{box-shadow: inset 3px 0 {TRAINABLE}; padding-left: 6px}}
.mm-is-warning {{box-shadow: inset 3px 0 {OPTIMIZER}; padding-left: 6px; font-weight: inherit}}
.mm-ranks {{display: flex; flex-wrap: wrap; gap: 4px; margin: 4px 0}}
.mm-rank {{border: 1px solid {INK}66; border-left: 4px solid {FROZEN}; border-radius: 4px; padding: 1px 7px;
  font-size: 12px; line-height: 1.5; font-variant-numeric: tabular-nums; white-space: nowrap}}
.mm-rank[for] {{cursor: pointer; text-decoration: underline dotted}}
.mm-rank-waiting, .mm-rank-stopped {{border-color: {INK}}} .mm-rank-done {{border-left-color: {GATHERED}}}
.mm-rank-quiet {{border-color: {OPTIMIZER}; background: {OPTIMIZER}33}}
.mm-rank-failed {{border-color: {TRAINABLE}; background: {TRAINABLE}33}}
.mm-seen {{position: relative; width: 220px; height: 220px}}
.mm-seen > * {{position: absolute; inset: 0; width: 100%; height: 100%}}
.mm-seen img {{image-rendering: pixelated}} .mm-seen div {{display: grid}}
.mm-tokens {{display: flex; flex-wrap: wrap; gap: 4px; margin: 4px 0 10px}}
.mm-token {{border: 1px solid {INK}66; border-radius: 4px; padding: 2px 7px; line-height: 1.3; min-width: 2em}}
.mm-token i {{display: block; height: 3px; background: {FROZEN}}} .mm-token small {{opacity: .8}}
.mm-key {{display: inline-block; width: 1.2em; height: .7em; margin-right: .4em; background: var(--c)}}
.mm-fold:not(:checked) ~ pre {{display: none}}
.mm-figures {{display: flex; flex-wrap: wrap; gap: .5em 2em; line-height: 1.4}}
.mm-figures b {{display: block; font-size: 1.7em}}
.mm-charts {{display: grid; grid-template-columns: repeat(auto-fill, minmax(min(300px, 100%), 1fr)); gap: 8px 16px}}
.mm-scroll {{overflow-x: auto}}
.mm-unit {{outline: none}} .mm-unit:is(:hover, :focus) .mm-detail {{display: inline}}
svg:has(.mm-unit:hover) .mm-unit:not(:hover) .mm-detail, svg:has(.mm-unit:is(:hover, :focus)) .mm-hint {{display: none}}
.mm-hint {{opacity: .8}}
.mm-unit:focus-visible > rect:nth-last-of-type(1) {{stroke: currentColor; stroke-width: 4}}
.mm-cards {{display: grid; grid-template-columns: repeat(auto-fill, minmax(112px, 1fr)); gap: 12px}}
.mm-card {{margin: 0; border: 1px solid {INK}66; border-radius: 8px; overflow: hidden; font-size: 13px}}
.mm-card img {{width: 100%; display: block; image-rendering: pixelated}}
.mm-card figcaption {{padding: .5em .7em; line-height: 1.35}}
</style>"""
"""What all HTML of the package needs. Text has the color of the page around it, so every theme can be read."""
