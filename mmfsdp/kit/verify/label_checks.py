"""The checks of labels and of the loss: each changes labels or tokens of one batch, and looks at the loss.

They need neither logits nor the names of a model's parts: which tokens a loss depends on, and how the losses of some
labels make up the loss of all of them, says what it predicts, from what, and what it is a mean over. So they work for a
head that computes the loss itself, too. The model is in eval mode, in one process.
"""

from __future__ import annotations

import math

import torch

from ...core.step_batch import IGNORED_LABEL
from .lines import NOTE, OK, WRONG, Line
from .token_batch import TokenBatch, inputs_of, micro_batches_of
from .trial import Trial

MOVED = 1e-6
"""Relative change of the loss, above which it depends on what was changed; masked tokens change no bit of it."""
EQUAL = 1e-4
"""Relative difference below which two losses are equal."""
MIN_SHARED = 4
"""Tokens with which all rows begin, and which count in the loss, that may be a prompt."""
MAX_TRIED = 4
"""Labels that are tried, to find two whose losses differ enough."""


def check_labels(trial: Trial) -> Line | None:
    """Every batch has labels that count, and none of them is a token that stands for a picture."""
    masked, counted, prompts = [], 0, []
    for rank, whole in enumerate(trial.loop.batches):
        for batch in micro_batches_of(whole):
            tokens = TokenBatch(batch, trial.plain)
            if tokens.labels is None:
                return None
            counts = tokens.labels != IGNORED_LABEL
            if not counts.any():
                masked.append(rank)
            # No answer has such a token: there is nothing to learn from predicting it.
            pictures = tokens.picture_tokens() & set(tokens.labels.unique().tolist())
            if pictures:
                words = f"token {min(pictures)}, which stands for a picture, is in the labels of rank {rank}'s batch"
                return Line(WRONG, "labels", words, "set the labels of pictures to -100")
            counted += int(counts.sum())
            prompts.append(shared_beginning(tokens))
    if masked:
        words = f"all labels of rank {masked[0]}'s batch are masked (-100): its loss is 0/0"
        fix = "look at how the answer is found in the tokens; leave out rows without one, or raise the length"
        return Line(WRONG, "labels", words, fix)
    # A longer prompt was tried (batches.py): its tokens count as the answer does.
    if trial.loop.labels_of_prompt:
        words = "a row with a longer prompt has more labels: the prompt counts in the loss, as the answer does"
        return Line(WRONG, "labels", words, "set the labels of the prompt to -100")
    text = f"each batch has labels that count, {counted} in all"
    if min(prompts) >= MIN_SHARED:
        text += f"; all rows begin with the same {min(prompts)} of them: a prompt, if it is one, should be masked"
        return Line(NOTE, "labels", text)
    return Line(OK, "labels", text)


def shared_beginning(tokens: TokenBatch) -> int:
    """Return how many labels at the beginning of all rows count and are equal in all of them."""
    labels = tokens.labels
    assert labels is not None
    equal = (labels == labels[:1]).all(dim=0) & (labels[0] != IGNORED_LABEL)
    return 0 if len(labels) < 2 else int(equal.long().cumprod(dim=0).sum())


def check_shift(trial: Trial) -> Line | None:
    """Each label is predicted from the tokens before it: all of them, and not from itself."""
    tokens = TokenBatch(trial.loop.batches[0], trial.plain)
    shift = tokens.shift()
    if tokens.labels is None:
        return None
    if shift is None:
        return Line(NOTE, "shift", "not checked: the labels are not tokens of input_ids")
    place = middle_of_text(tokens, shift)
    if place is None:
        return Line(NOTE, "shift", "not checked: no label is in the middle of a text")
    row, column = place
    labels = tokens.only([place])
    predicted = column + shift
    seen = []
    # From two tokens before the predicted one to the one after it: each place tells another fault.
    for position in range(predicted - 2, predicted + 2):
        if 0 <= position < labels.shape[1] and depends_on(trial, tokens, labels, (row, position)):
            seen.append(position - predicted)
    # The order matters: a mask that lets later tokens through shows the predicted one, too.
    if 1 in seen:
        words = "a label is predicted from the tokens after it, too, and from itself"
        return Line(WRONG, "shift", words, "give every layer a causal mask (is_causal=True), in packed rows as well")
    if 0 in seen:
        words = "a label is predicted from the token that it is: labels are not shifted"
        return Line(WRONG, "shift", words, "compare logits[:, :-1] with labels[:, 1:]")
    # The nearest token that has an effect is two before: one shift too many.
    if -1 not in seen and -2 in seen:
        fix = "pass labels that are not shifted, or do not shift them in the loss"
        where = "in the batch, and again in the model" if shift == 1 else "both times in the model"
        words = f"labels are shifted twice, {where}: a label is predicted without the token before it"
        return Line(WRONG, "shift", words, fix)
    if -1 not in seen:
        return Line(NOTE, "shift", "not checked: the loss hardly depends on the tokens before a label")
    return Line(OK, "shift", "a label is predicted from the token before it, and not from itself")


def middle_of_text(tokens: TokenBatch, shift: int) -> tuple[int, int] | None:
    """Return (row, column) of a label such that its token, the two before it and the one after it are text."""
    assert tokens.labels is not None and tokens.ids is not None
    text = set(tokens.labels.unique().tolist()) - tokens.picture_tokens()
    for row, ids in enumerate(tokens.ids.tolist()):
        for column in tokens.counted(row):
            low, high = column + shift - 2, column + shift + 2
            if low >= 0 and high <= len(ids) and text.issuperset(ids[low:high]):
                return row, column
    return None


def depends_on(trial: Trial, tokens: TokenBatch, labels: torch.Tensor, place: tuple[int, int]) -> bool:
    """Return True if what is predicted for some labels depends on the input token at (row, position).

    Two losses of other labels are subtracted: what no label is in, such as a contrastive loss, cancels out.
    """
    assert tokens.ids is not None
    # Any other token will do as the other label.
    first = int(labels[labels != IGNORED_LABEL][0])
    other_labels = torch.where(labels == IGNORED_LABEL, labels, tokens.other_token(first))
    changed = tokens.ids.clone()
    changed[place] = tokens.other_token(int(changed[place]))
    values, size = [], 0.0
    for ids in (tokens.ids, changed):
        losses = [tokens.loss(trial.loop.loss, labels=each, input_ids=ids) for each in (labels, other_labels)]
        values.append(losses[0] - losses[1])
        size = max(size, abs(losses[0]), abs(losses[1]))
    return abs(values[1] - values[0]) > MOVED * max(size, 1e-3)


def is_moved(before: float, after: float) -> bool:
    """Return True if a loss has changed."""
    return abs(after - before) > MOVED * max(abs(before), 1e-3)


def check_mean(trial: Trial) -> Line | None:
    """The loss is a mean over the labels that count: each of them has the same weight."""
    tokens = TokenBatch(trial.loop.batches[0], trial.plain)
    if tokens.labels is None or hasattr(trial.plain, "count_label_tokens"):
        return None
    # Rows with most labels first: the check needs several labels in one row.
    rows = sorted(range(len(tokens.labels)), key=lambda row: -len(tokens.counted(row)))
    columns = tokens.counted(rows[0])
    if len(columns) < MIN_SHARED:
        return Line(NOTE, "mean", "not checked: too few labels count")

    def loss(*places: tuple[int, int]) -> float:
        return tokens.loss(trial.loop.loss, labels=tokens.only(places))

    two = [(rows[0], columns[-2]), (rows[0], columns[-1])]
    loss_of_two = loss(*two)
    losses = {place: loss(place) for place in [(rows[0], column) for column in columns[:-2][:MAX_TRIED]]}
    usable = [place for place, value in losses.items() if math.isfinite(value)]
    if not usable:
        return Line(NOTE, "mean", "not checked: the loss of a label alone is not finite")
    # With equal losses a mean and a sum of means could not be told apart.
    one = max(usable, key=lambda place: abs(losses[place] - loss_of_two))
    # A mean over labels of losses a, b, c: the loss of all three is (a + b + c) / 3.
    together, alone = loss(one, *two), loss(one)
    if not math.isfinite(together):
        return Line(NOTE, "mean", "not checked: the loss of some labels alone is not finite")
    fix = "sum the losses of all labels that are not -100, and divide by their number (reduction='mean')"
    if is_equal(together, alone + loss_of_two):
        words = "the sum over the labels is divided by a number that does not depend on them, as that of all positions"
        return Line(WRONG, "mean", words, fix)
    if not is_equal(together, (alone + 2 * loss_of_two) / 3):
        words = "the loss of three labels is not the mean of their losses: masked labels count, or some weigh more"
        return Line(WRONG, "mean", words, fix)
    others = tokens.counted(rows[1])[-2:] if len(rows) > 1 else []
    if len(others) == 2:
        two = [(rows[1], column) for column in others]
        together, loss_of_two = loss(one, *two), loss(*two)
        # One label in the first row and two in the second: a mean over rows weighs the single one twice as much.
        by_tokens, by_rows = (alone + 2 * loss_of_two) / 3, (alone + loss_of_two) / 2
        if not is_equal(together, by_tokens):
            of_rows = is_equal(together, by_rows) or is_equal(together, alone + loss_of_two)
            how = "a mean over rows of the means of their labels" if of_rows else "no mean over the labels of all rows"
            return Line(WRONG, "mean", f"the loss is {how}: a label of a short row weighs more", fix)
    return Line(OK, "mean", "the loss is a mean over the labels that count")


def is_equal(a: float, b: float) -> bool:
    """Return True if two losses are equal up to rounding."""
    return abs(a - b) <= EQUAL * max(abs(a), 1e-3)


def check_padding(trial: Trial) -> Line | None:
    """Padding changes nothing: it is not in the labels, and its tokens have no effect on the loss."""
    found_padding = False
    for rank, batch in enumerate(trial.loop.batches):
        tokens = TokenBatch(batch, trial.plain)
        padding = tokens.padding()
        if padding is None or tokens.labels is None or tokens.ids is None:
            return None
        shift = tokens.shift() or 0
        # A label stands `shift` columns before the token that it is, where the batch shifts labels itself.
        counted = (tokens.labels != IGNORED_LABEL) & padding.roll(-shift, dims=1)
        if counted.any():
            words = f"{int(counted.sum())} labels of rank {rank}'s batch are padding"
            return Line(WRONG, "padding", words, "mask them: labels[attention_mask == 0] = -100")
        found_padding |= bool(padding.any())
    if not found_padding:
        return Line(NOTE, "padding", "not checked: no batch here has padding")
    for batch in trial.loop.batches:
        tokens = TokenBatch(batch, trial.plain)
        padding = tokens.padding()
        assert padding is not None and tokens.ids is not None
        if not padding.any():
            continue
        changed = torch.where(padding, tokens.other_token(int(tokens.ids[padding][0])), tokens.ids)
        before, after = tokens.loss(trial.loop.loss), tokens.loss(trial.loop.loss, input_ids=changed)
        if is_moved(before, after):
            words = f"other tokens in the padding change the loss, from {before:.6g} to {after:.6g}"
            fix = "pass attention_mask on to every layer, and leave labels of -100 out of the loss"
            return Line(WRONG, "padding", f"{words}: it is attended to, or counts in the loss", fix)
    return Line(OK, "padding", "it has no label, and its tokens have no effect on the loss")


def check_copies(trial: Trial) -> Line | None:
    """The loss of a batch that holds each row two or three times is that of the batch."""
    if trial.loop.joined is not None:
        return None  # check_loss joins the batches of ranks
    return line_of_copies(trial)


def line_of_copies(trial: Trial) -> Line | None:
    """Return the line for the losses of copies; None if a batch has no rows that can be copied."""
    losses = losses_of_copies(trial)
    if losses is None:
        return None
    one, two, three = losses
    fix = "make every part of the loss a mean over labels or rows: a sum grows with the batch, and depends on the ranks"
    if is_equal(one, two):
        return Line(OK, "loss", "a mean: a batch with each row twice has the same loss")
    if is_equal(two, 2 * one):
        return Line(WRONG, "loss", "a sum: with each row twice it is twice as large", fix)
    # The loss grows by the same amount with each copy: a mean plus a sum.
    if is_equal(three - one, 2 * (two - one)):
        words = f"a part of it is a sum: with each row twice it is {two:.6g} in place of {one:.6g}"
        return Line(WRONG, "loss", words, fix)
    words = "rows of a batch act on each other, as in a contrastive loss, so that more ranks are not a larger batch"
    return Line(NOTE, "loss", words)


def losses_of_copies(trial: Trial) -> list[float] | None:
    """Return the losses of a batch that holds each row once, twice, three times; None if it cannot be so made."""
    batch = trial.loop.batches[0]
    inputs = inputs_of(batch)
    if inputs is None:
        return None
    tokens = TokenBatch(batch, trial.plain)
    losses = []
    for count in (1, 2, 3):
        copies = {}
        for key, value in inputs.items():
            # Numbers and lists of the whole batch stay as they are.
            is_stacked = isinstance(value, torch.Tensor) and value.dim() > 0
            copies[key] = torch.cat([value] * count) if is_stacked else value
        try:
            losses.append(tokens.loss(trial.loop.loss, **copies))
        except Exception:  # of a person's forward: a tensor of the whole batch, which has no rows
            return None
    return losses if math.isfinite(sum(losses)) else None
