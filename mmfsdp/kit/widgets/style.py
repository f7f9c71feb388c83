"""Colors and style sheets of figures, reports and widgets, for light and dark pages."""

from __future__ import annotations

FROZEN, TRAINABLE, GATHERED, REDUCED = "#0072B2", "#C45100", "#009E73", "#CC79A7"
"""The four colors of every picture, which people with any color vision can tell apart (Okabe and Ito, 2008). Their
vermilion is darkened so that white text on it is legible. Contrast at least 2.8:1 on black and on white."""
OPTIMIZER, ACTIVATIONS = "#E69F00", "#56B4E9"
"""Two more of theirs, for areas only."""
BUFFERS = "#A6761D"
RUN_COLORS = ("#8250DF", "#6B8E23", "#C2185B", "#5B7083", "#8D6E63", "#00838F")
"""Colors of a run's curves, and of runs that are compared, in order. None stands for a kind of memory or of unit."""
INK = "#787878"
"""Lines and axes: a grey that is visible on white and on JupyterLab's dark background. Text has the page's color."""

LIGHT = {
    "frozen": FROZEN,
    "trainable": TRAINABLE,
    "optimizer": "#B88200",
    "gathered": "#00875F",
    "gradients": "#B85C94",
    "buffers": INK,
    "activations": "#2F8FC7",
    "more": "#B42318",
    "less": "#0F6B39",
    "warn": "#8A4B00",
}
DARK = {
    "frozen": "#3A9AD9",
    "trainable": "#E8762D",
    "optimizer": OPTIMIZER,
    "gathered": "#1FBF92",
    "gradients": "#E39AC3",
    "buffers": "#9A9A9A",
    "activations": "#8CCBF0",
    "more": "#FF8D7D",
    "less": "#57D98D",
    "warn": "#FFB454",
}
FILL = {name: f"var(--mm-{name},{color})" for name, color in LIGHT.items()}
"""Kind of memory or of traffic -> its color in the pictures of a plan, at least 3:1 on the page in both themes. Where
the sheet is missing, as in a picture on its own, it is the light theme's."""
FILL["page"] = "var(--mm-page,var(--jp-layout-color0,Canvas))"


def _theme(colors: dict[str, str]) -> str:
    return "".join(f"--mm-{name}: {color};" for name, color in colors.items())


THEMES = f"""
:root {{{_theme(LIGHT)} --mm-page: Canvas}}
[data-jp-theme-light="false"], .vscode-dark, .vscode-high-contrast, html[theme="dark"] {{{_theme(DARK)}}}
[data-jp-theme-light] {{--mm-page: var(--jp-layout-color0)}}
.vscode-light, .vscode-dark, .vscode-high-contrast {{--mm-page: var(--vscode-editor-background, Canvas)}}
html[theme="dark"] {{--mm-page: #383838}}
.cell-output-ipywidget-background {{{_theme(LIGHT)} --mm-page: #fff; color: #111}}
"""
"""Of notebooks: JupyterLab; VS Code, which lays widgets on white in dark themes, too (issue 7161 of
github.com/microsoft/vscode-jupyter); Colab, whose dark pages have this grey. A report follows the system instead: see
markup.py."""
DARK_PAGE = f"@media (prefers-color-scheme: dark) {{:root {{{_theme(DARK)}}}}}"

STYLE = f"""<style>
{THEMES}
.mm-quiet {{opacity: .8; line-height: 1.35}}
.mm-error, .mm-warning {{font-weight: 600; line-height: 1.35; border-left: 4px solid {TRAINABLE}; padding-left: .5em}}
.mm-warning {{border-color: {OPTIMIZER}; font-weight: inherit}}
.mm-trouble {{border: 1px solid {TRAINABLE}; border-left-width: 6px; border-radius: 4px; background: {TRAINABLE}1f;
  padding: .4em .7em; margin: .4em 0; line-height: 1.4; overflow-wrap: anywhere}}
.mm-trouble-warning {{border-color: {OPTIMIZER}; background: {OPTIMIZER}1f}}
.mm-parts {{display: flex; flex-wrap: wrap; gap: 0 1em; margin: .3em 0 0; line-height: 1.5}}
.mm-table {{border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 12px}}
.mm-table th, .mm-table td {{padding: .3em .6em; text-align: right; white-space: nowrap; line-height: 1.2;
  border-bottom: 1px solid {INK}55}}
.mm-table th:first-child, .mm-table td:first-child {{text-align: left; white-space: normal}}
.mm-table td:first-child {{min-width: 15em; overflow-wrap: anywhere}}
.mm-figures {{display: flex; flex-wrap: wrap; gap: .5em 2em; line-height: 1.4; margin: .3em 0 .6em}}
.mm-figures b {{display: block; font-size: 1.7em}}
.mm-bar {{display: flex; height: 24px}} .mm-legend {{display: flex; flex-wrap: wrap; gap: 0 1.5em;
  margin: .4em 0; font-size: 12px}}
.mm-legend i {{display: inline-block; width: 12px; height: 12px; margin-right: 5px; vertical-align: -1px}}
.mm-charts {{display: grid; grid-template-columns: repeat(auto-fill, minmax(min(300px, 100%), 1fr)); gap: 8px 16px}}
.mm-scroll {{overflow-x: auto; margin: .5em 0}}
.mm-plan h3 {{margin: .6em 0 .1em; line-height: 1.35; font-size: 1.05em}}
.mm-plan h3 .mm-quiet {{font-weight: 400; margin-left: .5em}}
.mm-plan g:focus {{outline: none}} .mm-plan summary {{font-size: 12px; cursor: pointer}}
.mm-lanes {{position: relative}} .mm-plan .mm-lanes svg {{margin: 0; display: block}}
.mm-open {{position: absolute; margin: 0; padding: 0; opacity: 0; cursor: pointer}}
.mm-open:checked {{left: var(--left) !important; width: var(--width) !important}}
.mm-opened {{display: none; font-size: 12px; line-height: 1.5}} .mm-plan .mm-opened svg {{margin: 0}}
.mm-plan .mm-scroll {{margin: 0}} .mm-plan svg {{max-width: none !important}}
.mm-facts {{display: grid; grid-template-columns: max-content 1fr; gap: .1em 1em; margin: .8em 0; font-size: 14px}}
.mm-facts dt {{opacity: .8}} .mm-facts dd {{margin: 0; overflow-wrap: anywhere}}
.mm-table th button {{all: unset; cursor: pointer; font-weight: 600}}
.mm-table th button:focus-visible {{outline: 2px solid}} .mm-table th[aria-sort="ascending"]::after {{content: " ▲"}}
.mm-table th[aria-sort="descending"]::after {{content: " ▼"}}
.mm-pair {{display: flex; flex-wrap: wrap; gap: 8px 24px}}
.mm-pair > div {{min-width: 0}} .mm-pair h4 {{margin: .6em 0 0}}
.mm-pair-table td {{white-space: normal; overflow-wrap: anywhere; max-width: 40em}}
.mm-compared {{margin-bottom: .8em}}
.mm-compared input {{font: inherit; margin: .4em}} .mm-compared tr[hidden] {{display: none}}
.mm-compared td:first-child {{min-width: 10em}}
.mm-about {{min-height: 2.7em; margin: .2em 0; font-size: 13px; line-height: 1.35; overflow-wrap: anywhere}}
.mm-about > span {{outline: none !important}} .mm-about > [class^="mm-b"] {{display: none}}
.mm-plan:has([class^="mm-b"]:is(:hover, :focus-visible)) .mm-hint {{display: none}}
.mm-now {{min-height: 2.7em; margin: .2em 0; font-size: 13px; line-height: 1.35; overflow-wrap: anywhere}}
.mm-step-title {{display: flex; flex-wrap: wrap; align-items: baseline; gap: 0 1em}} .mm-scroll {{position: relative}}
.mm-play {{font: inherit; font-size: 12px; min-width: 5em; cursor: pointer}}
.mm-head {{position: absolute; top: 0; height: 100%; margin: 0; opacity: 0; pointer-events: none}}
.mm-head:focus-visible ~ svg .mm-head-line {{outline: 2px solid; outline-offset: 2px}}
.mm-head:not([hidden]) ~ svg {{cursor: ew-resize; touch-action: pan-y}}
.mm-dragged .mm-about > * {{display: none !important}}
.mm-plan-figures {{display: grid; grid-template-columns: repeat(auto-fit, minmax(11em, 1fr))}}
.mm-plan-figures > div {{font-size: 12px; line-height: 1.35}} .mm-plan-figures b {{font-size: 20px}}
.mm-more, .mm-less, .mm-same {{font-size: 13px; white-space: nowrap}}
.mm-more {{color: var(--mm-more)}} .mm-less {{color: var(--mm-less)}} .mm-same {{opacity: .8; font-weight: 400}}
.mm-cards {{display: grid; grid-template-columns: repeat(auto-fill, minmax(112px, 1fr)); gap: 12px;
  margin: .4em 0 1em}}
.mm-card {{margin: 0; border: 1px solid {INK}66; border-radius: 8px; overflow: hidden; font-size: 13px}}
.mm-card img {{width: 100%; display: block; image-rendering: pixelated}}
.mm-card figcaption {{padding: .5em .7em; line-height: 1.35; overflow-wrap: anywhere}}
.mm-learning-head {{display: flex; flex-wrap: wrap; align-items: center; gap: 2px 1em; line-height: 1.4}}
.mm-learning input {{flex: 1 1 10em; max-width: 30em; margin: 0; accent-color: {FROZEN}}}
.mm-learning input[hidden] {{display: none}} .mm-learning b {{display: inline-block; min-width: 5.5em}}
</style>"""
"""All HTML of the package needs this sheet. Text has the color of the page around it, so every theme is legible."""

KERNEL_GONE = "This view has lost its kernel: run its cell again. A run goes on without it."
"""Stands on top of a widget in place of a broken icon at each of its parts."""
LIGHT_ARROW = (
    "url(\"data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 18 18'%3E"
    "%3Cpath d='M4 7l5 5 5-5' fill='none' stroke='%23ddd' stroke-width='2'/%3E%3C/svg%3E\")"
)
"""Of a list that unfolds, on dark pages: the one of ipywidgets is black."""
WIDGET_STYLE = f"""<style>
.mm-widget .widget-html-content {{min-width: 0}}
.mm-widget .widget-html:has(> .widget-html-content:empty) {{display: none}}
.mm-widget progress {{display: block; width: 100%}}
.mm-widget.jupyter-widgets-disconnected::before {{content: "{KERNEL_GONE}";
  font: 600 13px/1.4 system-ui, sans-serif; color: inherit; padding: 0 0 0 .5em; border-left: 4px solid {TRAINABLE}}}
.mm-widget .jupyter-widgets-disconnected::before {{content: none}}
.mm-widget.jupyter-widgets-disconnected :is(button, input, select, textarea) {{pointer-events: none; opacity: .5}}
.mm-widget summary {{cursor: pointer}} .mm-widget p {{margin: .4em 0}} .mm-widget svg {{display: block; margin: .5em 0}}
.mm-widget :is(input, select, textarea, button, .lm-TabBar-tab, [tabindex]:not(.mm-plan *)):focus-visible {{
  outline: 2px solid var(--jp-brand-color1, #1976d2); outline-offset: 1px}}
.mm-form .mm-row {{display: flex; flex-flow: row wrap; align-items: center; overflow: visible; gap: 0 .6em}}
.mm-form .mm-row > .widget-inline-hbox, .mm-form .mm-row > .widget-textarea {{
  width: 27em; max-width: 100%; flex: none}}
.mm-form .mm-row > .widget-html {{flex: 1 1 18em; min-width: 0; margin: 2px}}
.mm-form .mm-row .widget-html-content {{line-height: 1.35; white-space: normal}}
.mm-form .mm-row .widget-button {{width: auto; flex: none}}
.mm-form .widget-label {{text-align: left}}
.mm-widget .widget-checkbox .widget-label-basic {{display: flex; align-items: center; gap: 5px}}
.mm-widget .widget-checkbox input[type="checkbox"] {{margin: 0}}
[data-jp-theme-light="false"] .mm-widget select {{--jp-widgets-dropdown-arrow: {LIGHT_ARROW}}}
.mm-widget :is(.jupyter-widget-Collapse-header, .lm-TabBar-tabLabel) {{color: var(--jp-ui-font-color1, inherit)}}
.mm-title {{margin: .7em 0 .2em; line-height: 1.35}}
.mm-title .mm-quiet {{font-weight: 400; margin-left: .5em}}
.mm-changes {{margin: .4em 0; padding-left: 1.2em; line-height: 1.4; overflow-wrap: anywhere}}
.mm-log {{margin: 0; line-height: 1.3; font-size: 12px}}
.jp-RenderedText pre.mm-log {{white-space: pre; word-break: normal}}
.mm-ranks {{display: flex; flex-wrap: wrap; gap: 4px; margin: 4px 0}}
.mm-rank {{border: 1px solid {INK}66; border-left: 4px solid {FROZEN}; border-radius: 4px; padding: 1px 7px;
  font-size: 12px; line-height: 1.5; font-variant-numeric: tabular-nums; white-space: nowrap}}
.mm-rank-waiting, .mm-rank-stopped {{border-color: {INK}}} .mm-rank-done {{border-left-color: {GATHERED}}}
.mm-rank-quiet {{border-color: {OPTIMIZER}; background: {OPTIMIZER}33}}
.mm-rank-failed {{border-color: {TRAINABLE}; background: {TRAINABLE}33}}
</style>"""
"""Widgets need this sheet, too."""
