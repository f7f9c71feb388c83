"""Properties of Flamingo that hold for every language model family."""

from functools import partial

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from mmfsdp.kit.models import Flamingo, TokenIds
from mmfsdp.kit.models.backbones import is_causal
from mmfsdp.kit.models.cross_attention import media_mask
from mmfsdp.kit.models.flamingo import decoder_layers
from tests.models.conftest import greedy

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def picture(batch: dict, sample: int, index: int) -> dict:
    """The batch with another picture in one place."""
    vision = batch["media"]["vision"].clone()
    vision[sample, index] = torch.randn_like(vision[sample, index])
    return {**batch, "media": {"vision": vision}}


def with_weights_of(model: Flamingo, language):
    """A plain language model with the weights of the Flamingo's."""
    state = model.language_model.state_dict().items()
    plain = {name.replace("decoder_layer.", "").replace("table.", ""): p for name, p in state}
    language.load_state_dict({name: plain[name] for name in language.state_dict()})
    return language


def trains(name: str) -> bool:
    return name.startswith("perceiver.") or ".cross_attention." in name or ".new_tokens." in name


def test_with_closed_gates_it_is_the_language_model(family, build, batch, text_only):
    tokens = TokenIds(image=3, end_of_chunk=60, pad=61, known=60, new=2)  # so that the text-only model knows <image>
    model = build(family, gate=0.0, tokens=tokens)
    language = with_weights_of(model, text_only(family))
    ids = batch(model)["input_ids"].clamp(max=59)
    media = batch(model)["media"]

    logits = model(ids, media=media).logits
    assert torch.equal(logits[..., :60], language(ids).logits)
    for module in model.modules():
        if hasattr(module, "attn_gate"):
            module.attn_gate.data.fill_(0.5)
    assert not torch.allclose(model(ids, media=media).logits, logits)


@pytest.mark.parametrize("every", [1, 3])
def test_it_is_the_language_model_with_cross_attention_before_some_layers(family, every, build, text_only):
    """By hand, around the plain language model. What the cross attention computes: test_interop.py."""
    tokens = TokenIds(image=3, end_of_chunk=2, pad=0, known=60, new=0)
    model = build(family, cross_attention_every=every, tokens=tokens)
    assert not any(".new_tokens." in name for name, _ in model.named_parameters())
    language = with_weights_of(model, text_only(family))
    # Text before the first picture; pictures one after another; a picture at the very end; a sample with two only.
    ids = torch.tensor([[5, 6, 3, 7, 3, 3, 8, 2, 3, 9], [4, 3, 11, 12, 2, 13, 14, 15, 16, 3]])
    pictures = torch.randn(2, 4, 1, 3, 16, 16)
    patches = model.vision_encoder(pictures.flatten(0, 2)).unflatten(0, (2, 4, 1))
    seen = model.perceiver(patches)
    mask = media_mask((ids == 3).cumsum(1), pictures=4, latents=3, attend_all=False)
    layers = decoder_layers(language)[1]
    for i in range(every - 1, 4, every):
        look = partial(look_first, model.layers[i].cross_attention, seen.flatten(1, 2), mask)
        layers[i].register_forward_pre_hook(look, with_kwargs=True)
    torch.testing.assert_close(model(ids, media={"vision": pictures}).logits, language(ids).logits, **CLOSE)


def look_first(cross_attention, media, mask, layer, args, kwargs):
    """What a layer is given, after it looked at the pictures."""
    return (cross_attention(args[0], media, mask), *args[1:]), kwargs


def test_text_sees_the_pictures_before_it_and_no_later_ones(family, build, batch):
    model = build(family)
    inputs = batch(model)
    logits = model(**inputs).logits

    first = model(**picture(inputs, 0, 0)).logits
    assert torch.equal(first[0, :2], logits[0, :2])
    assert not torch.isclose(first[0, 2:], logits[0, 2:]).all(dim=-1).any()
    second = model(**picture(inputs, 0, 1)).logits
    assert torch.equal(second[0, :6], logits[0, :6])
    assert not torch.isclose(second[0, 6:], logits[0, 6:]).all(dim=-1).any()
    assert torch.equal(first[1], logits[1]) and torch.equal(second[1], logits[1])


def test_padding_side_and_batch_order_do_not_matter(family, build, batch, left):
    model = build(family)
    inputs = batch(model)
    logits = model(**inputs).logits

    ids, mask = left(inputs["input_ids"], inputs["attention_mask"])
    padded_left = model(ids, attention_mask=mask, media=inputs["media"]).logits
    torch.testing.assert_close(padded_left[1, 2:], logits[1, :8], **CLOSE)
    turned = model(
        inputs["input_ids"].flip(0),
        attention_mask=inputs["attention_mask"].flip(0),
        media={"vision": inputs["media"]["vision"].flip(0)},
    ).logits.flip(0)
    torch.testing.assert_close(turned[0], logits[0], **CLOSE)
    torch.testing.assert_close(turned[1, :8], logits[1, :8], **CLOSE)


def test_generation_is_greedy_decoding_with_and_without_cache(family, build, batch, left):
    model = build(family)
    inputs = batch(model)
    ids, mask = left(inputs["input_ids"], inputs["attention_mask"])
    model.generation_config.eos_token_id = None
    rest = {"attention_mask": mask, "media": inputs["media"], "eos_token_id": None, "max_new_tokens": 5}

    cached = model.generate(ids, **rest)
    assert torch.equal(cached, model.generate(ids, **rest, use_cache=False))
    said = greedy(model, ids, mask, inputs["media"], steps=5, never=model.tokens.image)
    assert torch.equal(cached, said)
    second = {"vision": inputs["media"]["vision"][1:]}
    alone = model.generate(ids[1:, 2:], media=second, eos_token_id=None, max_new_tokens=5)
    assert torch.equal(alone[0], said[1, 2:])


def test_beam_search_and_sampling_see_the_right_pictures(family, build, batch, left):
    model = build(family)
    inputs = batch(model)
    ids, mask = left(inputs["input_ids"], inputs["attention_mask"])
    rest = {"attention_mask": mask, "media": inputs["media"], "max_new_tokens": 4}
    beams = model.generate(ids, **rest, num_beams=3, use_cache=True)
    assert torch.equal(beams, model.generate(ids, **rest, num_beams=3, use_cache=False))
    sampled = model.generate(ids, **rest, do_sample=True, num_return_sequences=2)
    assert len(sampled) == 4 and torch.equal(sampled[1, :10], ids[0])
    assert (beams[:, 10:] != model.tokens.image).all() and (sampled[:, 10:] != model.tokens.image).all()


def test_generation_stops_at_the_end_of_a_chunk(build, batch):
    model = build("llama")
    head = model.language_model.get_output_embeddings()
    head.new_tokens.weight.data[0] = 0
    inputs = {k: v[:1] if k != "media" else {"vision": v["vision"][:1]} for k, v in batch(model).items()}
    norm = model.language_model.model.norm
    norm.register_forward_hook(lambda _, __, out: out.index_fill(-1, torch.tensor([0]), 9.0))
    head.new_tokens.weight.data[0, 0] = 1e4
    assert model.generate(**inputs)[0, 10:].tolist() == [model.tokens.end_of_chunk]


def test_loss_is_the_mean_over_label_tokens(build, batch):
    model = build("llama")
    inputs = batch(model)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    labels[0, :7] = -100
    out = model(**inputs, labels=labels)
    logits = out.logits.log_softmax(-1)
    wanted = [-logits[r, i - 1, labels[r, i]] for r in range(2) for i in range(1, 10) if labels[r, i] != -100]
    assert len(wanted) == 3 + 7
    torch.testing.assert_close(out.loss, torch.stack(wanted).mean())
    assert model(**inputs).loss is None
    nothing = model(**inputs, labels=torch.full_like(labels, -100)).loss
    nothing.backward()
    assert nothing == 0


def test_only_what_is_not_frozen_gets_gradients(family, build, batch):
    model = build(family)
    for name, p in model.named_parameters():
        p.requires_grad_(trains(name))
    inputs = batch(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in trained)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


@pytest.mark.parametrize("kind", ["llama", "mpt"])
def test_recomputed_activations_give_the_same_gradients(kind, build, batch):
    def gradients(model: Flamingo) -> dict:
        inputs = batch(model)
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        return {n.replace("_checkpoint_wrapped_module.", ""): p.grad for n, p in model.named_parameters()}

    plain, recomputing = build(kind), build(kind)
    for i, layer in enumerate(recomputing.layers):
        recomputing.layers[i] = checkpoint_wrapper(layer)
    one, other = gradients(plain), gradients(recomputing)
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name])


def test_nothing_stays_on_the_layers_after_a_call(family, build, batch):
    model = build(family)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    hooks = sum(len(m._forward_pre_hooks) for m in model.modules())
    model(**batch(model))
    model.generate(batch(model)["input_ids"][:, :8], media=batch(model)["media"], max_new_tokens=2)
    assert before == {name: set(vars(module)) for name, module in model.named_modules()}
    assert hooks == sum(len(m._forward_pre_hooks) for m in model.modules())


def test_blank_and_absent_pictures_are_the_same_to_text_without_any(build):
    model = build("llama")
    ids = torch.randint(4, 60, (2, 6))
    blank = model(ids, media={"vision": torch.zeros(2, 1, 1, 3, 16, 16)}).logits
    torch.testing.assert_close(blank, model(ids).logits)


def test_frozen_parts_stay_in_eval_mode(build, batch):
    dropout = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    model = build("gpt2", config=dropout)
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith("perceiver.") or ".cross_attention." in name)
    model.train()
    assert model.training and model.perceiver.norm.training and model.layers[1].cross_attention.ff.training
    assert not model.vision_encoder.visual.training and not model.layers[1].decoder_layer.training
    inputs = batch(model)
    assert torch.equal(model(**inputs).logits, model(**inputs).logits)
    model.requires_grad_(True).train()
    assert not torch.equal(model(**inputs).logits, model(**inputs).logits)


def test_frozen_parts_may_be_in_another_format(family, build, batch):
    model = build(family)
    for name, p in model.named_parameters():
        if not trains(name):
            p.data = p.data.bfloat16()
    inputs = batch(model)
    out = model(**inputs, labels=inputs["input_ids"])
    out.loss.backward()
    assert out.logits.dtype == torch.bfloat16 and model.perceiver.latents.grad.dtype == torch.float32


def test_mistakes_are_named(build, batch):
    model = build("llama")
    inputs = batch(model)
    with pytest.raises(ValueError, match="pictures for 1 samples, but input_ids has 2"):
        model(inputs["input_ids"], media={"vision": inputs["media"]["vision"][:1]})
    with pytest.raises(ValueError, match=r"'vision': \(2, 3, 16, 16\).*\(batch, pictures, frames, C, H, W\)"):
        model(inputs["input_ids"], media={"vision": torch.zeros(2, 3, 16, 16)})
    with pytest.raises(ValueError, match="audio"):
        model(inputs["input_ids"], media={**inputs["media"], "audio": torch.zeros(1)})
    cache = model(**inputs, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="media_time: needed with past_key_values"):
        model(inputs["input_ids"][:, -1:], past_key_values=cache)
    with pytest.raises(ValueError, match="a sample has 2 image tokens in input_ids but 0 pictures"):
        model(inputs["input_ids"])
    with pytest.raises(ValueError, match="a sample has 2 image tokens in input_ids but 1 pictures"):
        model.generate(inputs["input_ids"], media={"vision": inputs["media"]["vision"][:, :1]})
    with pytest.raises(ValueError, match="a prompt ends in padding; pad prompts on the left"):
        model.generate(**inputs)


def test_padding_on_the_right_needs_no_mask_where_a_language_model_says_it_is_causal(family, build, batch):
    """MPT's modules do not say it."""
    model = build(family)
    inputs = batch(model)
    mask = inputs.pop("attention_mask")
    assert is_causal(model.language_model) == (family != "mpt") and not mask.all()
    if is_causal(model.language_model):
        masked = model(**inputs, attention_mask=mask).logits
        torch.testing.assert_close(model(**inputs).logits[mask.bool()], masked[mask.bool()])
