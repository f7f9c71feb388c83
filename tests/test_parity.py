"""The parity lab: few cases with every wrapper, strategy and policy; `mmfsdp bench parity` runs them all."""

from mmfsdp.bench.parity import bench_parity, cases, table


def test_training_on_ranks_equals_training_in_one_process():
    rows = bench_parity(ranks=(2,), every=37) + bench_parity(ranks=(4,), every=87)
    assert all(row["ok"] for row in rows), table(rows)
    assert {row["backend"] for row in rows} == {"DDP", "FSDP1", "FSDP2"}
    strategies = {"NO_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"}
    assert {row["strategy"] for row in rows} == strategies
    assert {(row["accumulation"], bool(row["clip"]), row["checkpointing"]) for row in rows} >= {(1, True, "all")}
    assert {row["model"] for row in rows} == {"Flamingo", "MultimodalModel"}
    assert {row["policy"] for row in rows} == {"SHARD", "KEEP", "REPLICATE", "AUTO"}
    assert {row["new_rows_due"] for row in rows} == {0, 4}


def test_the_cases_are_all_there():
    assert len(list(cases(2))) == 2 * (3 + 2 * 7) * 2**3 and len(list(cases(4))) == 2 * (3 + 4 * 7) * 2**3
    assert len({str(case) for case in cases(4)}) == len(list(cases(4)))
