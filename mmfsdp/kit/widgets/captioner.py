"""Captioner: asks a trained model about pictures, and shows how sure it is of each word and what it needs to see."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets as w

from ...checkpoint.steps import complete_checkpoints
from ...params.in_words import size
from ..run.trust import own_code_of
from .cell import CellWidget, import_lock
from .markup import note
from .style import FROZEN, INK
from .worker import Worker

if TYPE_CHECKING:
    from ..data.batch import Sample
    from ..train.answers import Answer

EACH = 12
"""Pictures of each split that can be chosen."""
LARGEST = 30 << 20
"""Bytes of a file that may be uploaded."""
COVERING = -1
"""Stands among the layers for the map of what a word needs to see."""
MAX_COVERED = 100_000_000
"""Parameters of a model whose pictures are covered without being asked: that takes some 200 samples of a forward."""
MIN_LOSS = 0.05
"""Of probability: a word that loses less with any square covered depends on none of them."""
STYLE = f"""<style>
.mm-seen {{position: relative; width: 220px; height: 220px}}
.mm-seen > * {{position: absolute; inset: 0; width: 100%; height: 100%}}
.mm-seen + div {{width: 220px; min-height: 4em}}
.mm-seen img {{image-rendering: pixelated}} .mm-seen div {{display: grid}}
.mm-tokens {{display: flex; flex-wrap: wrap; gap: 4px; margin: 4px 0 10px}}
.mm-token {{border: 1px solid {INK}66; border-radius: 4px; padding: 2px 7px; line-height: 1.3; min-width: 2em}}
.mm-token i {{display: block; height: 3px; background: {FROZEN}}} .mm-token small {{opacity: .8; font-size: 12px}}
</style>"""


class Captioner(Worker, CellWidget):
    """Shows what a model says to pictures that no training has shown, or to one's own, and to a blank picture.

    Loads the newest checkpoint of a run in a thread. model and processor are there after `wait()`.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.model: Any = None
        self.processor: Any = None
        self.checkpoint = ""
        self.samples: dict[str, Sample] = {}
        self._picture_range: tuple[float, ...] = ()
        self.answer: Answer | None = None
        self._looked: dict[int, Any] = {}
        wide = w.Layout(width="20em")
        self.pick = w.Dropdown(description="picture", layout=wide)
        self.upload = w.FileUpload(accept="image/*", description="a picture of yours", layout=w.Layout(width="14em"))
        self.prompt = w.Text(description="prompt", layout=wide, continuous_update=False)
        self.layer = w.Dropdown(description="light", layout=w.Layout(width="25em"))
        self.token = w.ToggleButtons()
        self.token.style.button_width = "auto"
        self.note, self.seen, self.said = w.HTML(), w.HTML(), w.HTML()
        self.error_line = self.note
        hint = w.HTML(note("with the picture; click a word to see where it comes from"))
        self._looks = w.VBox([hint, self.token], layout=w.Layout(display="none"))
        tools = w.VBox([self.pick, self.upload, self.prompt, self.layer, self._looks, self.said])
        tools.layout.flex = "1 1 26em"
        top = w.HBox([self.seen, tools], layout=w.Layout(flex_flow="row wrap", grid_gap="12px"))
        super().__init__([w.HTML(STYLE, layout=w.Layout(display="none")), self.note, top])
        self.replace_older()
        self.pick.observe(lambda _: self._picked(), "value")
        self.prompt.observe(lambda _: self._ask_later(), "value")
        self.upload.observe(lambda _: self._uploaded(), "value")
        self.layer.observe(lambda _: self._draw_later(), "value")
        self.token.observe(lambda _: self._draw_later(), "value")
        self.work("load", self._load_once)

    def wait(self) -> Captioner:
        """Wait until what was asked is answered. Raises what kept the model from loading or answering."""
        self.wait_for_work()
        if self.failure:
            raise self.failure
        return self

    def busy_changed(self) -> None:
        """Say nothing more once all is answered."""
        if not self.busy and self.failure is None:
            self._say("")

    def close(self) -> None:
        """Take it off the page and let go of the model."""
        self.model = None
        super().close()

    def _load_once(self) -> None:
        """Load the newest checkpoint; again where that has failed before."""
        if self.model is None:
            self._say("loading the newest checkpoint…")
            self._load()

    def _load(self) -> None:
        with import_lock:
            from ..data.batch import Sample
            from ..models.attention_view import looking_layers
            from ..train.evaluate import load_run, new_samples, why_no_captions
        params, self.model, self.processor = load_run(self.path)
        self._picture_range = params.data.picture_range
        reason = why_no_captions(self.model, self.processor)
        if reason:
            raise ValueError(reason)
        self.checkpoint = complete_checkpoints(self.path / "checkpoints")[-1].name
        words = {"heldout": "new", "unseen": "never-seen combination"}
        with own_code_of(self.path, params):
            for split, samples in new_samples(params, self.processor, EACH):
                if not isinstance(samples[0], Sample):
                    raise ValueError("rows of an own reader are captioned by `mmfsdp caption`, and not here")
                self.samples |= {f"{words[split]} {i + 1}": sample for i, sample in enumerate(samples)}
        layers = [(f"what layer {i} attends to", i) for i in looking_layers(self.model)]
        is_small = sum(p.numel() for p in self.model.parameters()) <= MAX_COVERED
        self.layer.options = [("what the word needs to see", COVERING), *layers]
        self.layer.index = 0 if is_small else len(layers)
        self.pick.options = list(self.samples)
        self.pick.index = 0

    def _uploaded(self) -> None:
        """Take the picture that somebody has chosen on their machine."""
        if not self.upload.value or not self.samples:
            return
        from ..data.batch import Sample
        from ..data.pictures import CorruptRecord, open_picture

        file, self.upload.value = self.upload.value[-1], ()
        name = Path(str(file["name"])).name[:60] or "upload"
        try:
            if len(file["content"]) > LARGEST:
                raise CorruptRecord(name, f"is larger than {size(LARGEST)}")
            picture = open_picture(bytes(file["content"]), name=name, value_range=self._picture_range)
        except CorruptRecord as error:
            self._say(str(error), bad=True)
            return
        like = next(iter(self.samples.values()))
        given = f"yours: {name}"
        asked = Sample.of(like.prompt, "?")
        pictures = (picture,) * len(like.images)
        self.samples[given] = replace(
            like, messages=asked.messages, verbatim=asked.verbatim, images=pictures, name=name
        )
        self.pick.options = list(self.samples)
        self.pick.value = given

    def _picked(self) -> None:
        if self.pick.value is not None:
            self.prompt.value = self.samples[self.pick.value].prompt
            self._ask_later()

    def _ask_later(self) -> None:
        self.work("ask", self._ask, show=self._show_answers)

    def _ask(self) -> tuple[Sample, Answer, Answer]:
        """Return the chosen sample, and what the model says with its picture and without it."""
        from ..train.answers import answer

        self._load_once()
        self._say("asking…")
        sample = self.samples[self.pick.value].with_prompt(self.prompt.value)
        if not self.processor.takes(sample):
            raise ValueError("prompt: needs one <image> for each picture, where the picture stands")
        with_picture = answer(self.model, self.processor, sample)
        return sample, with_picture, answer(self.model, self.processor, sample, blank=True)

    def _show_answers(self, asked: tuple[Sample, Answer, Answer]) -> None:
        sample, seen, blank = asked
        self.answer, self._looked = seen, {}
        truth = "" if sample.text == "?" else f'<p class="mm-quiet">truth: {escape(sample.text)}</p>'
        with_picture = "" if seen.tokens else f"<div>with the picture{_tokens(seen)}</div>"
        self.said.value = f"{with_picture}{truth}<div>without it (blanked){_tokens(blank)}</div>"
        self.token.options = [(f"{piece} {chance:.0%}", i) for i, (piece, chance, _) in enumerate(seen.tokens)]
        self.token.tooltips = [others for _, _, others in seen.tokens]
        self.token.index = 0 if seen.tokens else None
        for part in (self._looks, self.layer):  # an answer of text alone has no words to click
            part.layout.display = None if seen.tokens else "none"
        self._draw_later()

    def _draw_later(self) -> None:
        self.work("draw", self._draw)

    def _draw(self) -> None:
        """Show the picture as the model sees it; where a layer looks for a word, it stays light."""
        if self.answer is None:
            return
        import numpy as np
        import torch

        if not self.answer.media:  # of an own model, whose inputs may be anything
            shown = np.asarray(self.samples[self.pick.value].images[0].convert("RGB"))
            self.seen.value = f'<div class="mm-seen"><img alt="the picture asked about" src="{_png(shown)}"></div>'
            return
        pixels = self.answer.media["vision"][0, 0, 0].cpu()
        mean, std = (torch.tensor(x)[:, None, None] for x in (self.processor.mean, self.processor.std))
        picture = ((pixels * std + mean).clamp(0, 1) * 255).byte().permute(1, 2, 0).numpy()
        shade, words = "", "where it looks cannot be shown"
        if self.token.value is not None:
            shade, words = self._map(self.token.value)
        told = f'<div class="mm-quiet">{words}</div>'
        image = f'<img alt="the picture asked about" src="{_png(picture)}">'
        self.seen.value = f'<div class="mm-seen">{image}{shade}</div>{told}'

    def _map(self, token: int) -> tuple[str, str]:
        """Return a shade over the picture for a word of the answer, as HTML, and what stays light, in words."""
        assert self.answer is not None
        if self.layer.value == COVERING:
            losses = self._look(COVERING)[token].clamp(min=0)
            most = float(losses.max())
            if most < MIN_LOSS:
                return "", f"covering any one place costs this word at most {most:.1%} of probability"
            told = f"light: the word is up to {most:.0%} less likely with this place covered"
            return _shade(losses.flatten().tolist()), told
        place = self.answer.ids.shape[1] - len(self.answer.tokens) + token - 1  # the query that made the word
        shade = _shade(self._look(self.layer.value)[0, place, 0].tolist())
        return shade, f"light: {self.layer.label}; what it attends to need not be what the word depends on"

    def _look(self, layer: int) -> Any:
        """Return the attention of a layer, (1, L, T, P), or what covering costs each word; once for each answer."""
        from ..models.attention_view import picture_attention
        from ..train.answers import losses_by_covering

        answer = self.answer
        assert answer is not None
        if layer not in self._looked and layer == COVERING:
            self._say("covering the picture, place by place…")
            self._looked[layer] = losses_by_covering(self.model, answer)
        elif layer not in self._looked:
            self._looked[layer] = picture_attention(self.model, answer.ids, media=answer.media, layer=layer)
        return self._looked[layer]

    def _say(self, words: str, *, bad: bool = False) -> None:
        self.note.value = note(words, "error" if bad else "quiet", role="status")


def _tokens(answer: Answer) -> str:
    """Return an answer as HTML, word by word: the fuller the line below, the surer; the mouse shows other words."""
    if not answer.tokens:
        return f'<div class="mm-tokens">{escape(answer.text)}</div>'
    words = "".join(
        f'<span class="mm-token" title="{escape(others)}">{escape(piece)}<i style="width:{chance:.0%}"></i>'
        f"<small>{chance:.0%}</small></span>"
        for piece, chance, others in answer.tokens
    )
    return f'<div class="mm-tokens" aria-label="{escape(answer.text)}">{words}</div>'


def _shade(weights: list[float]) -> str:
    """Return a cell over each patch, the darker the less it is looked at; nothing for patches that are no square."""
    side, most = round(len(weights) ** 0.5), max(weights)
    if side * side != len(weights) or most <= 0:
        return ""
    cells = "".join(
        f'<i style="background:rgba(0,0,0,{0.85 * (1 - x / most):.2f})" title="{x:.1%}"></i>' for x in weights
    )
    return f'<div style="grid-template-columns:repeat({side},1fr)">{cells}</div>'


def _png(pixels: Any) -> str:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
