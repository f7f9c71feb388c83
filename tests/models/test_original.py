"""OpenFlamingo's arithmetic, derived again: a small functional implementation that shares nothing with the package but
the frozen backbones. It gives what the recorded original gave, and so does Flamingo, for every layout and interval."""

import json
import zlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mmfsdp.compat.openflamingo import load_open_flamingo
from mmfsdp.models import Flamingo, TokenIds, build_language, build_vision
from mmfsdp.params import BackboneParams

REFERENCE = json.loads((Path(__file__).parent.parent / "data" / "open_flamingo_gpt_neox.json").read_text())
KNOWN, IMAGE, END = 120, 122, 121
HEADS = 8
TEXT = {"vocab_size": KNOWN, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
LAYOUTS = {
    "gpt_neox": ({**TEXT, "intermediate_size": 64}, "gpt_neox.layers"),
    "llama": ({**TEXT, "intermediate_size": 64, "num_key_value_heads": 2}, "model.layers"),
    "opt": ({**TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64}, "model.decoder.layers"),
}
IDS = {
    "recorded": REFERENCE["ids"],
    # Text before the first picture; pictures one after another; a picture at the very end; a sample with one only.
    "several": [[5, 6, IMAGE, 7, IMAGE, IMAGE, 8, END, IMAGE, 9], [4, IMAGE, 11, 12, END, 13, 14, 15, 16, IMAGE]],
}


def rule(name: str, shape: tuple[int, ...]) -> Tensor:
    """A weight by the rule that the reference file states."""
    crc = zlib.crc32(name.encode())
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(crc))
    if name.endswith("_gate"):
        return torch.full(shape, 0.5 if crc % 2 else -0.5)
    return 1 + 0.1 * noise if len(shape) == 1 and name.endswith("weight") else 0.2 * noise


class Original:
    """The weights of an OpenFlamingo by the original's names, and its forward."""

    def __init__(self, layout: str, every: int):
        config, self.layers = LAYOUTS[layout]
        self.every = every
        self.vision = build_vision(BackboneParams(source="open_clip", config=REFERENCE["clip"])).eval()
        vocabulary = {"vocab_size": REFERENCE["vocab_after_resize"]}
        self.language = build_language(BackboneParams(config={"model_type": layout, **config, **vocabulary})).eval()
        self.weights: dict[str, Tensor] = {}
        for name, p in self.vision.visual.named_parameters():
            self.weights[f"vision_encoder.{name}"] = p
        for name, p in self.language.named_parameters():
            self.weights["lang_encoder." + self._inside(name)] = p
        width = self.vision.dim
        shapes = {"latents": (64, width), "norm.weight": (width,), "norm.bias": (width,)}
        for i in range(6):
            attention = {"norm_media": (width,), "norm_latents": (width,)}
            for norm in attention:
                shapes |= {f"layers.{i}.0.{norm}.{leaf}": (width,) for leaf in ("weight", "bias")}
            shapes |= {f"layers.{i}.0.to_q.weight": (512, width), f"layers.{i}.0.to_kv.weight": (1024, width)}
            shapes |= {f"layers.{i}.0.to_out.weight": (width, 512)}
            shapes |= {f"layers.{i}.1.{name}": shape for name, shape in self._ff(width).items()}
        shapes = {f"perceiver.{name}": shape for name, shape in shapes.items()}
        for i in self.crossed:
            place = f"lang_encoder.{self.layers}.{i}.gated_cross_attn_layer"
            shapes |= {f"{place}.attn_gate": (1,), f"{place}.ff_gate": (1,)}
            shapes |= {f"{place}.attn.norm.{leaf}": (32,) for leaf in ("weight", "bias")}
            shapes |= {f"{place}.attn.to_q.weight": (512, 32), f"{place}.attn.to_kv.weight": (1024, width)}
            shapes |= {f"{place}.attn.to_out.weight": (32, 512)}
            shapes |= {f"{place}.ff.{name}": shape for name, shape in self._ff(32).items()}
        self.added = {name: rule(name, shape).requires_grad_() for name, shape in shapes.items()}
        for name, p in self.weights.items():
            p.data = rule(name, tuple(p.shape))
        self.weights |= self.added

    @property
    def crossed(self) -> list[int]:
        return [i for i in range(4) if (i + 1) % self.every == 0]

    def _ff(self, dim: int) -> dict[str, tuple[int, ...]]:
        return {"0.weight": (dim,), "0.bias": (dim,), "1.weight": (4 * dim, dim), "3.weight": (dim, 4 * dim)}

    def _inside(self, name: str) -> str:
        place, _, rest = name.partition(f"{self.layers}.")
        number, _, leaf = rest.partition(".")
        return f"{self.layers}.{number}.decoder_layer.{leaf}" if rest and not place else name

    def logits(self, ids: Tensor, pictures: Tensor) -> Tensor:
        """ids (B, L), pictures (B, T, F, C, H, W) -> (B, L, vocabulary)."""
        shape = pictures.shape[:3]
        patches = self.vision.visual(pictures.flatten(0, 2))[1]
        media = self.perceiver(patches.unflatten(0, shape).flatten(2, 3))  # (B, T, 64, D)
        time = (ids == IMAGE).cumsum(1)
        layers = self.language.get_submodule(self.layers)
        handles = []
        for i in self.crossed:
            name = f"lang_encoder.{self.layers}.{i}.gated_cross_attn_layer."

            def look(_, args, kwargs, name=name):
                return (self.cross(args[0], media, time, name), *args[1:]), kwargs

            handles.append(layers[i].register_forward_pre_hook(look, with_kwargs=True))
        try:
            return self.language(ids).logits
        finally:
            for handle in handles:
                handle.remove()

    def perceiver(self, patches: Tensor) -> Tensor:
        def norm(x: Tensor, name: str) -> Tensor:
            w = self.weights
            return F.layer_norm(x, x.shape[-1:], w[f"perceiver.{name}.weight"], w[f"perceiver.{name}.bias"])

        x = self.weights["perceiver.latents"].expand(*patches.shape[:2], -1, -1)
        for i in range(6):
            place = f"layers.{i}.0."
            latents = norm(x, f"{place}norm_latents")
            seen = torch.cat((norm(patches, f"{place}norm_media"), latents), dim=2)
            x = x + self.attention(latents, seen, f"perceiver.{place}", None)
            x = x + self.feed(x, f"perceiver.layers.{i}.1.")
        return norm(x, "norm")

    def cross(self, text: Tensor, media: Tensor, time: Tensor, name: str) -> Tensor:
        w = self.weights
        hidden = F.layer_norm(text, text.shape[-1:], w[f"{name}attn.norm.weight"], w[f"{name}attn.norm.bias"])
        slots = torch.arange(media.shape[1]).repeat_interleave(media.shape[2]) + 1
        sees = time[:, None, :, None] == slots  # (B, 1, L, T*64): the latest picture only
        out = self.attention(hidden, media.flatten(1, 2), f"{name}attn.", sees)
        text = text + out * w[f"{name}attn_gate"].tanh()
        return text + self.feed(text, f"{name}ff.") * w[f"{name}ff_gate"].tanh()

    def attention(self, query: Tensor, seen: Tensor, name: str, sees: Tensor | None) -> Tensor:
        q = query @ self.weights[f"{name}to_q.weight"].T
        k, v = (seen @ self.weights[f"{name}to_kv.weight"].T).chunk(2, -1)
        q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(-2, -3) for x in (q, k, v))
        scores = q * q.shape[-1] ** -0.5 @ k.transpose(-1, -2)
        if sees is not None:
            scores = scores.masked_fill(~sees, -torch.finfo(scores.dtype).max)
        share = (scores - scores.amax(-1, keepdim=True).detach()).softmax(-1)
        if sees is not None:  # text before the first picture
            share = share.masked_fill(~sees.any(-1, keepdim=True), 0.0)
        return (share @ v).transpose(-2, -3).flatten(-2) @ self.weights[f"{name}to_out.weight"].T

    def feed(self, x: Tensor, name: str) -> Tensor:
        w = self.weights
        hidden = F.layer_norm(x, x.shape[-1:], w[f"{name}0.weight"], w[f"{name}0.bias"])
        return F.gelu(hidden @ w[f"{name}1.weight"].T) @ w[f"{name}3.weight"].T


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    labels = ids.masked_fill(ids == IMAGE, -100)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def pictures(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    torch.randint(0, 120, (2, 14), generator=generator)
    return torch.randn(2, count, 1, 3, 32, 32, generator=generator)


def test_the_derived_original_gives_what_the_recorded_one_gave():
    original = Original("gpt_neox", 2)
    assert {name: list(p.shape) for name, p in original.weights.items()} == REFERENCE["parameter_shapes"]
    ids = torch.tensor(REFERENCE["ids"])
    logits = original.logits(ids, pictures(2))
    assert (logits - torch.tensor(REFERENCE["logits"])).abs().max() < 1e-4
    loss = loss_of(logits, ids)
    loss.backward()
    assert loss.item() == pytest.approx(REFERENCE["loss"], abs=1e-5)
    for name, norm in REFERENCE["grad_norms"].items():
        assert original.weights[name].grad.norm().item() == pytest.approx(norm, rel=1e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("every", [1, 3, *(pytest.param(every, marks=pytest.mark.extended) for every in (2, 4))])
def test_every_layout_and_interval_has_the_original_logits_and_gradients(layout, every, tmp_path):
    original = Original(layout, every)
    state = {name: p.detach() for name, p in original.weights.items()}
    torch.save(state, tmp_path / "checkpoint.pt")
    language = build_language(BackboneParams(config={"model_type": layout, **LAYOUTS[layout][0]}))
    vision = build_vision(BackboneParams(source="open_clip", config=REFERENCE["clip"]))
    tokens = TokenIds(image=IMAGE, end_of_chunk=END, pad=KNOWN, known=KNOWN, new=3)
    ours = Flamingo(vision, language, tokens=tokens, cross_attention_every=every).eval()
    load_open_flamingo(ours, tmp_path / "checkpoint.pt")
    for case, ids in IDS.items():
        ids = torch.tensor(ids)
        given = pictures(2 if case == "recorded" else 4)
        wanted = original.logits(ids, given)
        loss_of(wanted, ids).backward()
        out = ours(ids, media={"vision": given}, labels=ids.masked_fill(ids == IMAGE, -100))
        out.loss.backward()
        assert (out.logits - wanted).abs().max() < 1e-4
        assert out.loss.item() == pytest.approx(loss_of(wanted, ids).item(), rel=1e-5)
    named = dict(ours.named_parameters())
    for name, p in original.added.items():
        name = name.replace("lang_encoder", "language_model").replace("gated_cross_attn_layer", "cross_attention")
        assert p.grad is not None and p.grad.norm() > 0
        assert named[name].grad.norm().item() == pytest.approx(p.grad.norm().item(), rel=1e-3), name
