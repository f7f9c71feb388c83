"""The answers of commands with `--json`, a model each: its JSON schema is what `--json-schema` prints."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from ...params.findings import Finding
from ...predict.data_figures import BatchFigures
from ..run.files.reasons import Reason
from ..run.state import ListedRun, RankProgress
from ..run.trouble import Trouble
from .json_output import Answer


class Part(BaseModel):
    """A part of an answer."""

    model_config = Answer.model_config


# ---- plan ----


class UnitFigures(Part):
    """A unit of the plan: the modules whose parameters one all-gather fetches."""

    name: str
    kind: str
    """frozen, trainable or mixed."""
    frozen_policy: str | None
    """SHARD, KEEP or REPLICATE; null for a unit that trains."""
    grad_flow: bool
    """Backward passes through it."""
    parameters: int
    trainable_parameters: int
    at_rest_bytes: int
    """Its weights on each rank between two steps."""
    gathered_bytes: int
    """All of its weights once gathered, in the dtype of compute."""
    gathers_forward: int
    """All-gathers in the forward of a micro-step."""
    gathers_backward: int
    sent_bytes: int
    """Sent by a rank for this unit in an optimizer step."""


class DataSizes(Part):
    """The batches of a run by the texts and the picture headers of its records."""

    records: int
    """Records that were looked at."""
    of: int | None
    """All records to train on; null if unknown."""
    covers_run: bool
    """Every batch of the run was looked at."""
    largest: BatchFigures
    """The batch of the run with the highest peak."""
    possible: BatchFigures
    """The batch with the highest peak that these records could make in another order."""
    possible_peak_bytes: int
    """The most that a rank holds in a step with that."""
    median_tokens: int
    """Positions of a median micro-batch, padding included."""
    padding: float
    """Share of all positions that are padding."""
    waiting: float
    """Share of a step's compute in which a rank waits on average for the one with most tokens."""


class CostFigures(Part):
    """The cost of a plan on each rank."""

    sent_bytes: int
    """Sent by a rank in an optimizer step."""
    at_rest_bytes: int
    """Weights that a rank holds between two steps."""
    memory_bytes: int
    """The most that a rank holds in a step, without activations."""
    peak_bytes: int | None
    """The most that a rank holds in a step, if all texts have the maximum length; null where it is not predicted."""
    peak_when: str
    """Phase and unit of that peak."""
    batch_peak_bytes: int | None
    """The same with the largest batch of the data; null where they were not looked at."""
    batch: str
    """That batch in words, or why the data were not looked at."""
    data: DataSizes | None
    """The batches by the sizes of their records; null where these are not known."""


class StepSeconds(Part):
    """Predicted seconds of an optimizer step on a machine."""

    machine: str
    seconds: float
    """At best."""
    usual_seconds: float | None
    """The one number that measured steps were nearest to; null where none is known."""
    slowest_seconds: float
    bound_by: str
    """compute, memory or network."""
    compute: float
    memory: float
    network: float


class MeshFigures(Part):
    """The plan on another mesh of the same ranks."""

    dp_replicate: int
    dp_shard: int
    fits: bool
    """Its peak, with what a GPU needs beyond its tensors, is within a GPU's memory."""
    peak_bytes: int
    within_node_bytes: int
    between_nodes_bytes: int
    seconds: float


class LaterPhase(Part):
    """The figures of a phase in which other parameters train (`train.freeze_from`)."""

    begin: int
    """Steps that are done when it begins."""
    trainable_parameters: int
    cost: CostFigures
    learning_rates: str
    step: StepSeconds | None
    findings: list[Finding]


class ShardingFigures(Part):
    """A way to shard the run, and its cost on each rank; null where it is refused."""

    name: str
    """DDP, FSDP1, or FSDP2 with a frozen policy."""
    is_chosen: bool
    """The parameters choose it."""
    sent_bytes: int | None
    """Sent by a rank in an optimizer step."""
    at_rest_bytes: int | None
    """Weights that a rank holds between two steps."""
    peak_bytes: int | None
    """The most that a rank holds in a step."""
    seconds: float | None
    """Predicted seconds of a step on the machine, at best; null if the run is on CPUs."""
    machine: str
    """Machine of these seconds: that of --machine, else of H100s."""
    refused: str
    """The reason why this run cannot go this way; empty if it can."""


class PlanAnswer(Answer):
    """The prediction of `mmfsdp plan`. It is ok if the lint found no errors, so that a launch would start."""

    backend: str
    ranks: int
    dp_replicate: int
    dp_shard: int
    sharding_strategy: str
    frozen_policy: str
    why: str
    """The choice of AUTO, with its reason."""
    parameters: int
    trainable_parameters: int
    cost: CostFigures
    learning_rates: str
    """Learning rates by part in words; empty if all are train.lr."""
    step: StepSeconds | None
    """Null without --machine."""
    meshes: list[MeshFigures]
    """Every mesh, the best first; empty without --machine."""
    units: list[UnitFigures]
    """In the order in which they run."""
    ways: list[ShardingFigures] = []
    """Every way to shard this run: DDP, FSDP1, and FSDP2 with each frozen policy."""
    findings: list[Finding]
    """Findings of the lint in the plan, the data and the job."""
    later: list[LaterPhase] = []
    """Phases after the first one, with train.freeze_from."""


# ---- fit ----


class WayFigures(Part):
    """A frozen policy with a recomputation of activations."""

    change: dict[str, Any]
    """Parameters that choose it, by dotted name."""
    needed_bytes: int
    """Memory that a GPU needs, with what it needs beyond the tensors of the peak."""
    sent_bytes: int
    """Sent by a rank in an optimizer step."""
    fits: bool


class FitFigures(Part):
    """The answer to one thing that was asked."""

    asked: str
    """batch, length, pictures, picture, gpus or policy."""
    value: int | str | None
    """The answer; null if nothing fits."""
    unit: str
    now: int | str
    """Its value in the run as it is set."""
    change: dict[str, Any]
    """Parameters that make it so, by dotted name; empty where the data do, and where nothing fits."""
    peak_bytes: int | None
    """Tensors of a rank at the answer."""
    needed_bytes: int | None
    """Memory that a GPU needs for it."""
    further: int | None
    """One step further, where it does not fit; null if nothing is too much."""
    further_needed_bytes: int | None
    why_not: str
    """The mistake that one step further is, where memory is not what limits it."""
    traced: bool
    """Its step was traced; false where it was read off the lines through two smaller traces."""
    ways: list[WayFigures]
    """Of policy: all that were compared, those that send least first."""


class CurveFigures(Part):
    """The peak as a straight line over the visual tokens of a rank's micro-batch."""

    base_bytes: float
    bytes_per_token: float


class FitAnswer(Answer):
    """The sizes that fit into the memory of a GPU. It is ok if everything that was asked has an answer that fits."""

    machine: str
    capacity_bytes: int
    """Memory of a GPU, as torch reports it."""
    context_bytes: int
    """Of it, what must be free for CUDA's context and NCCL's buffers."""
    fragmentation: float
    """Share of the peak that must be free beyond it."""
    answers: list[FitFigures]
    curve: CurveFigures | None
    """Null where the size has nothing to do with visual tokens."""


# ---- verify, check ----


class VerifyAnswer(Answer):
    """The checks of `mmfsdp verify`. It is ok if no check found a fault."""

    lines: list[Finding]
    """A check each: `code` is its name, `level` is ok, wrong or note."""


class CheckLine(Part):
    """The finding of one check."""

    where: str
    """This machine, or the ranks or the job in which it was found."""
    level: str
    """ok, wrong or note."""
    code: str
    """Name of the check."""
    message: str
    fix: str


class CheckAnswer(Answer):
    """The checks of `mmfsdp check`. It is ok if no check found a fault."""

    folder: str
    """Run folder of the ranks, with their logs; empty if it is deleted, since nothing is wrong."""
    machine: dict[str, float]
    """Figures for plans that the ranks have measured, such as bandwidth in bytes per second."""
    lines: list[CheckLine]


# ---- new ----


class SampleFigures(Part):
    """A sample of the data."""

    label: str
    """Its file and row."""
    pictures: list[tuple[int, int]]
    """Width and height of each."""
    text: str


class NewAnswer(Answer):
    """The findings of `mmfsdp new` in the data, and the file that it wrote."""

    file: str
    """The configuration that was written."""
    params: dict[str, Any]
    """All values of that configuration."""
    source: str
    """Value of data.source with which the data are read."""
    formats: list[str]
    """Files of rows, with their formats."""
    shape: str
    """Shape of the first usable row, in words."""
    train_records: int | None
    """Null for shards, whose records are not counted before they are read."""
    heldout_records: int | None
    samples: list[SampleFigures]
    """The first three."""
    notices: list[Finding]
    """Things to know of the data before a run."""
    next: list[str]
    """Commands to go on with."""


# ---- arena ----


class ArenaAnswer(Answer):
    """The result of a file in the arena. It is not ok if the file or the result was refused."""

    file: str
    result: str
    """The file with the whole result, from whose counts the figures follow; empty if there is none."""
    step_ms: float | None
    """The number: milliseconds of a step; null if the model does not fit, or if the file was refused."""
    torchs_step_ms: float | None
    """The same of torch's fully_shard."""
    largest_parameters: int | None
    """Parameters of the largest model that fits."""
    levels: list[str]
    """Names of the levels that the file has reached."""
    points: int
    """One for each level, for an autograder."""
    refused: list[Finding]
    """Reasons why the file or the result was refused; empty if it was not."""


# ---- runs, status, watch ----


class RunsAnswer(Answer):
    """The runs of some folders, oldest first. It is always ok."""

    runs: list[ListedRun]


class StatusAnswer(Answer):
    """The state of a run now. It is not ok if the run has ended and did not succeed."""

    name: str
    path: str
    status: str
    """QUEUED, PREPARING, STARTING, RUNNING, SUSPENDED, COMPLETED, FAILED, CANCELLED or LOST."""
    done: bool
    """The state is final."""
    succeeded: bool
    """It completed, and its loss stayed finite."""
    step: int
    steps: int
    why: Reason | None
    """Null where the status says all."""
    notes: list[str]
    """Other findings, such as that Slurm does not answer."""
    part: str
    """The part of a run that goes on, such as its imports; empty if it waits or is done."""
    doing: str
    """Its activity in that part, by the rank that is furthest behind."""
    seconds_left: float | None
    """Until the last step, at the pace of the newest ones."""
    metrics: dict[str, Any]
    """Rank 0's newest row of metrics, such as step, loss, samples_per_s; empty before the first step."""
    ranks: list[RankProgress]
    troubles: list[Trouble]
    """Things that are wrong, the worst first."""
    traceback: str
    """That of the rank that failed first."""


class WatchLine(Part):
    """A line that a run has printed, or what has changed. The last object of `mmfsdp watch` is a StatusAnswer."""

    kind: str
    """log, event, progress, state, part, trouble, traceback or replay."""
    text: str
    rank: int | None
    """The rank that printed it, or that it is about; null where it is about the whole run."""
