"""What a run's ranks reach is measured on the very operators and in the very wrapper that it will have."""

from dataclasses import asdict

import torch
from ranks import on_ranks
from tiny import tiny_batch, tiny_flamingo

from mmfsdp.estimate import step_time
from mmfsdp.params import FSDPParams, LaunchParams
from mmfsdp.plan import make_plan
from mmfsdp.train.machine import machine_here


def measured(folder: str) -> list[dict]:
    profile = f"{folder}/cluster.yaml"
    with open(profile, "w") as file:
        file.write("machine: {flops: 123}\n")
    found = []
    for fields in ({"backend": "DDP"}, {"backend": "FSDP1"}, {"mixed_precision": "bf16"}, {"cluster": profile}):
        cluster = fields.pop("cluster", None)
        launch = LaunchParams(cluster=cluster, executor="slurm" if cluster else "local")
        example = tiny_batch().inputs()
        plan = make_plan(tiny_flamingo(), FSDPParams(**fields), world_size=2, example=example)
        here = machine_here(launch, torch.device("cpu"), dtype=torch.float32, plan=plan)
        bare = machine_here(launch, torch.device("cpu"), dtype=torch.float32)
        found.append({"here": asdict(here), "bare": asdict(bare), "step": step_time(plan, machine=here).overlapped})
    return found


def test_the_rates_of_a_small_model_are_its_own(tmp_path):
    for *rows, given in on_ranks(measured, 2, str(tmp_path)):
        for row in rows:
            here, bare = row["here"], row["bare"]
            assert not here["overlap"] and here["name"] == "this machine's CPU"
            assert here["flops"] > 0 and here["memory"] > 0 and here["bandwidth"] > 0
            assert here["overhead"] > 0 == bare["overhead"] and here["latency"] > 0
            assert row["step"] > 1e-3
        assert given["here"]["flops"] == given["bare"]["flops"] == 123, "a cluster's profile comes before measuring"
