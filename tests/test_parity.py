"""The parity lab: every 15th case on two ranks, every 47th on four; `mmfsdp bench parity` runs them all."""

from mmfsdp.bench.parity import bench_parity, cases, table


def test_training_on_ranks_equals_training_in_one_process():
    rows = bench_parity(ranks=(2,), every=15) + bench_parity(ranks=(4,), every=47)
    assert all(row["ok"] for row in rows), table(rows)
    assert {row["backend"] for row in rows} == {"DDP", "FSDP1", "FSDP2"}
    assert {row["model"] for row in rows} == {"Flamingo", "MultimodalModel"}
    assert {row["policy"] for row in rows} == {"SHARD", "KEEP", "REPLICATE", "AUTO"}
    assert {row["new_rows_due"] for row in rows} == {0, 4}


def test_the_cases_are_all_there():
    assert len(list(cases(2))) == 2 * (3 + 2 * 7) * 2**3 and len(list(cases(4))) == 2 * (3 + 4 * 7) * 2**3
    assert len({str(case) for case in cases(4)}) == len(list(cases(4)))
