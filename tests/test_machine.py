"""The rates that a run measures of its ranks."""

from dataclasses import asdict

import torch
from ranks import on_ranks
from tiny import tiny_batch, tiny_flamingo

from mmfsdp.core.planner import make_plan
from mmfsdp.estimate import step_time
from mmfsdp.params import FSDPParams, LaunchParams
from mmfsdp.train.profile import machine_here


def measured(folder: str) -> dict:
    profile = f"{folder}/cluster.yaml"
    with open(profile, "w") as file:
        file.write("machine: {flops: 123}\n")
    plan = make_plan(tiny_flamingo(), FSDPParams(), world_size=2, example=tiny_batch().inputs())
    here = machine_here(LaunchParams(), torch.device("cpu"), dtype=torch.float32)
    slurm = LaunchParams(cluster=profile, executor="slurm")
    profiled = machine_here(slurm, torch.device("cpu"), dtype=torch.bfloat16)
    seconds = step_time(plan, machine=here).overlapped
    return {"here": asdict(here), "profiled": asdict(profiled), "step_s": seconds}


def test_the_rates_of_the_ranks_predict_a_step_and_a_clusters_profile_replaces_them(tmp_path):
    for row in on_ranks(measured, 2, str(tmp_path)):
        here = row["here"]
        assert not here["overlap"] and here["name"] == "this machine's CPU"
        assert min(here["flops"], here["memory"], here["bandwidth"], here["latency"], row["step_s"]) > 0
        assert row["profiled"]["flops"] == 123 and row["profiled"]["memory"] > 1e6
