"""A few cases of the parity bench; `python -m tests.bench.parity` runs all."""

from tests.bench.parity import bench_parity, cases, table


def test_training_on_ranks_equals_training_in_one_process():
    rows = bench_parity(ranks=(4,), every=67)
    assert all(row["ok"] for row in rows), table(rows)
    assert {row["backend"] for row in rows} == {"DDP", "FSDP1", "FSDP2"}
    strategies = {"NO_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"}
    assert {row["strategy"] for row in rows} == strategies
    assert len({(row["accumulation"], row["clip"], row["checkpointing"]) for row in rows}) == 2**3
    assert {row["model"] for row in rows} == {"Flamingo", "MultimodalModel"}
    assert {row["policy"] for row in rows} == {"SHARD", "KEEP", "REPLICATE", "AUTO"}
    assert {row["new_rows_due"] for row in rows} == {0, 4}


def test_the_cases_are_all_there():
    for ranks, strategies in ((2, 2), (4, 4)):
        names = [str(case) for case in cases(ranks)]
        assert len(names) == len(set(names)) == 2 * (3 + strategies * 7) * 2**3
