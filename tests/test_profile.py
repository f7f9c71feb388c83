"""What a profile says: how much communication nothing runs beside."""

from math import isclose

from mmfsdp.train.profile import length, summary, union
from mmfsdp.widgets.report import timeline

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


def test_intervals_are_joined_to_the_same_time():
    assert union([(3, 4), (0, 2), (1, 2.5)]) == [(0, 2.5), (3, 4)]
    assert union([(0, 1), (1.5, 2)], gap=0.6) == [(0, 2)]
    assert length(union([(3, 4), (0, 2), (1, 2.5)])) == 3.5


def test_the_picture_says_what_it_shows_and_escapes_it():
    picture = timeline({"compute": [(0, 0.1)], "<b>": [(0.05, 0.2)]}, seconds=0.2, title="a & b")
    assert "<b>" not in picture and "&lt;b&gt;" in picture and "a &amp; b" in picture and picture.count("<rect") >= 2
