"""What a profile says: how much communication nothing runs beside."""

import json
from math import isclose
from pathlib import Path
from types import SimpleNamespace

import torch

from mmfsdp.kit.train.profile import length, summary, union, work_events
from mmfsdp.kit.widgets.report import timeline

MS = 1_000_000


def event(name, start, end, device="CPU"):
    return name, device, start * MS, end * MS


def test_communication_is_exposed_where_no_compute_runs():
    found = summary(
        [
            event("aten::mm", 0, 10),
            event("aten::add", 4, 6),  # within the other
            event("gloo:all_gather", 8, 14),
            event("gloo:reduce_scatter", 12, 18),
            event("fsdp::chunk_cat", 16, 20),
            event("FSDP::pre_forward", 0, 20),  # a range, that waits, too
            event("c10d::allgather_", 0, 20),
        ],
        steps=2,
    )
    wanted = {"seconds": 0.010, "communication_s": 0.005, "exposed_s": 0.003, "compute_s": 0.007}
    assert all(isclose(found[key], value) for key, value in wanted.items()), found
    assert set(found["lanes"]) == {"compute", "all-gather", "reduce-scatter"}
    assert all(0 <= a < b <= 0.0100001 for spans in found["lanes"].values() for a, b in spans)


def test_on_a_gpu_its_own_lanes_count_and_not_the_hosts():
    nccl = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    found = summary(
        [
            event("aten::mm", 0, 1),
            event("sm90_xmma_gemm_bf16", 5, 15, "CUDA"),
            event(nccl, 10, 20, "CUDA"),
            event("nccl:_reduce_scatter_base", 0, 30),
        ],
        steps=1,
    )
    assert set(found["lanes"]) == {"compute", "reduce-scatter"}
    assert isclose(found["exposed_s"], 0.005) and isclose(found["communication_s"], 0.010)


def test_short_kernels_are_as_long_in_2026_as_at_the_beginning_of_time():
    since_1970 = 1_795_000_000_000_000_000
    kernels = [("gemm", "CUDA", since_1970 + 2000 * i, since_1970 + 2000 * i + 1100) for i in range(1000)]
    found = summary(kernels, steps=1)
    assert isclose(found["compute_s"], 1000 * 1100e-9, rel_tol=1e-9)


def recorded_event(name, device, start, end, annotation):
    """Return an event with the methods of torch's, at microseconds."""
    return SimpleNamespace(
        name=lambda: name,
        device_type=lambda: getattr(torch.autograd.DeviceType, device),
        start_ns=lambda: start * 1000,
        end_ns=lambda: end * 1000,
        is_user_annotation=lambda: annotation,
    )


def test_annotations_on_the_gpus_timeline_hide_no_communication():
    path = Path(__file__).parent.parent.joinpath("files") / "gpu_events.json"
    events = [recorded_event(*values) for values in json.loads(path.read_text())["events"]]
    found = summary(work_events(events), steps=1)
    # The gather from 0 to 40 us is exposed but for nothing; that from 50 to 90 runs beside the product from 40 to 80;
    # the reduction from 130 to 180 runs beside the product from 90 to 150.
    assert isclose(found["exposed_s"], 80e-6) and isclose(found["communication_s"], 130e-6)
    assert isclose(found["compute_s"], 110e-6) and isclose(found["seconds"], 190e-6)


def test_the_hosts_annotations_are_kept_since_gloo_marks_its_collectives_so():
    gloo = recorded_event("gloo:all_gather", "CPU", 0, 5, True)
    assert work_events([gloo]) == [("gloo:all_gather", "CPU", 0, 5000)]


def test_intervals_are_joined_to_the_same_time():
    assert union([(3, 4), (0, 2), (1, 2.5)]) == [(0, 2.5), (3, 4)]
    assert union([(0, 1), (1.5, 2)], gap=0.6) == [(0, 2)]
    assert length(union([(3, 4), (0, 2), (1, 2.5)])) == 3.5


def test_the_picture_says_what_it_shows_and_escapes_it():
    picture = timeline({"compute": [(0, 0.1)], "<b>": [(0.05, 0.2)]}, seconds=0.2, title="a & b")
    assert "<b>" not in picture and "&lt;b&gt;" in picture and "a &amp; b" in picture and picture.count("<rect") >= 2
