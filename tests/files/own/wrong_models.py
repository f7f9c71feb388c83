"""Models, processors and metrics with a mistake each."""

import random

import small_vlm
import torch
import two_towers
from torch import nn


def only_a_model():
    return two_towers.build()[0]


def no_module():
    return "a model", two_towers.PairProcessor()


def no_processor():
    return two_towers.build()[0], ["a processor"]


def raising():
    width = {"small": 16}["large"]  # the line that fails
    return two_towers.build(width)


def lazy():
    model, processor = two_towers.build()
    model.words = nn.LazyLinear(8)
    return model, processor


def compiled():
    model, processor = two_towers.build()
    return torch.compile(model), processor


def not_copied():
    """Holds what cannot be copied."""
    model, processor = two_towers.build()
    model.rows = (row for row in [])
    return model, processor


def without_loss():
    class Silent(two_towers.TwoTowers):
        def forward(self, pixels, words):
            return {"similarity": self.pictures(pixels) @ self.words(words["counts"]).T}

    return Silent(16, 0.0), two_towers.PairProcessor()


def of_a_loss_for_each_row():
    class Rows(two_towers.TwoTowers):
        def forward(self, pixels, words):
            return self.pictures(pixels).sum(dim=1)

    return Rows(16, 0.0), two_towers.PairProcessor()


def without_gradient():
    class Constant(two_towers.TwoTowers):
        def forward(self, pixels, words):
            return pixels.mean()

    return Constant(16, 0.0), two_towers.PairProcessor()


def of_other_width():
    model, processor = two_towers.build()
    model.words = nn.Linear(7, 8)
    return model, processor


def processor_without_tensors():
    return two_towers.build()[0], lambda rows: {"pixels": [1, 2, 3]}


def processor_that_takes_no_row():
    def process(rows):
        raise LookupError(f"no column 'image' in {type(rows[0]).__name__}")

    return two_towers.build()[0], process


def processor_of_one_row():
    """Takes each row, and no batch."""
    inner = two_towers.PairProcessor()

    def process(rows):
        if len(rows) > 1:
            raise ValueError("pictures of one batch must be of one size")
        return inner(rows)

    return two_towers.build()[0], process


def processor_with_a_generator():
    """Its random numbers are not those that are seeded for each batch."""
    inner, drawn = two_towers.PairProcessor(), random.Random(0)

    def process(rows):
        batch = inner(rows)
        return batch | {"pixels": batch["pixels"] + drawn.random()}

    return two_towers.build()[0], process


def reading_values():
    class Reading(two_towers.TwoTowers):
        def forward(self, pixels, words):
            loss = super().forward(pixels, words)["loss"]
            return loss if loss.item() < 100 else loss / 2

    return Reading(16, 0.0), two_towers.PairProcessor()


class InNumpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return torch.from_numpy(gradient.numpy() * 2)


def with_a_backward_in_numpy():
    class Doubling(two_towers.TwoTowers):
        def forward(self, pixels, words):
            return InNumpy.apply(super().forward(pixels, words)["loss"])

    return Doubling(16, 0.0), two_towers.PairProcessor()


def not_synced():
    """Generates as long as each rank likes."""
    model, processor = small_vlm.build()

    class Loop(small_vlm.SmallVLM):
        def generate(self, pixels, input_ids, attention_mask, max_new_tokens=3):
            return super().generate(pixels, input_ids, attention_mask, max_new_tokens=max_new_tokens)

    return Loop(), processor


def not_finite(predictions, samples):
    return {"score": torch.tensor(float("nan"))}


def no_dict(predictions, samples):
    return 0.5


def of_odd_name(predictions, samples):
    return {"<b>": 0.5}


def of_one_sample(predictions, samples):
    first, *others = samples
    if others:
        raise ValueError("knows one sample only")
    return {"one": 1.0}


def mute():
    """Generates nothing."""
    model, processor = small_vlm.build()

    class Mute(small_vlm.SmallVLM):
        def generate(self, pixels, input_ids, attention_mask, **options):
            raise ValueError("has no words")

    return Mute(), processor
