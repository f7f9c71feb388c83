"""Where the bugs of lesson 08 were seen, and what would have caught them: what `check` tells when a script is right."""

STORIES = {
    "08.bug1": (
        "Seen in transformers issue 37186, 'Quen FSDP model training hangs when some batches do not contain images' "
        "(https://github.com/huggingface/transformers/issues/37186), and in torchtitan pull request 4777, 'Fix FSDP "
        "hanging for multimodal models' (https://github.com/pytorch/torchtitan/pull/4777). What would have caught "
        "it: one test step in which one rank gets a batch without a picture; mmfsdp.verify does it "
        "(without_picture=...)."
    ),
    "08.bug2": (
        "By default fully_shard keeps the root unit gathered after forward, since backward needs it at once; see "
        "pytorch issue 131965, on a root that stays unsharded after forward "
        "(https://github.com/pytorch/pytorch/issues/131965). After an evaluation no backward comes: step() changes "
        "the shards, and the next forward still has the old weights. The same cause, another effect: pytorch issue "
        "149205, on parameters that an optimizer does not update "
        "(https://github.com/pytorch/pytorch/issues/149205). What would have caught it: a run without an evaluation "
        "beside the run with one, and their losses compared to the last digit."
    ),
    "08.bug3": (
        "enable_input_require_grads was made for checkpointing with use_reentrant=True, which loses the gradient if "
        "no input requires one; use_reentrant=False does not need it: transformers issue 21381, 'gradient "
        "checkpointing disables requires_grad when freezing part of models (fix with use_reentrant=False)' "
        "(https://github.com/huggingface/transformers/issues/21381). In lmms-finetune issue 71 "
        "(https://github.com/zjysteven/lmms-finetune/issues/71) a user asks why a training script calls it. What "
        "would have caught it: the number of all-gathers in backward, beside the plan's; the plan's lint calls it "
        "inputs-require-grad."
    ),
    "08.bug4": (
        "Seen in Lightning issue 5243, 'Returning None from training_step with multi GPU DDP training' "
        "(https://github.com/Lightning-AI/pytorch-lightning/issues/5243), and in NeMo Automodel pull request 2468, "
        "'keep DFlash DDP ranks in lockstep on no-valid-anchor skips' "
        "(https://github.com/NVIDIA-NeMo/Automodel/pull/2468). What would have caught it: the number of the step, "
        "reduced with the gradients and compared; or as many collectives on each rank at the end of an epoch."
    ),
    "08.bug5": (
        "Seen in prime-rl issue 2515, 'Validation loop deadlocks with FSDP due to unsynchronized iteration' "
        "(https://github.com/PrimeIntellect-ai/prime-rl/issues/2515), where one rank had fewer batches to evaluate, "
        "and in pytorch issue 77562 (https://github.com/pytorch/pytorch/issues/77562), where the ranks did not "
        "agree on whether to save. What would have caught it: a first run of a few steps, with an evaluation and a "
        "checkpoint after the second, on two ranks."
    ),
    "08.bug6": (
        "The reason for FSDP1's own clip_grad_norm_: pytorch issue 72548, 'Implement clip_grad_norm for FSDP "
        "models' (https://github.com/pytorch/pytorch/issues/72548). Seen in OpenDiloco pull request 6, 'fix grad "
        "norm fsdp' (https://github.com/PrimeIntellect-ai/OpenDiloco/pull/6). What would have caught it: the norm "
        "printed on every rank, or computed once more after clipping: it must not be above the limit."
    ),
    "08.bug7": (
        "Seen in dlrover issue 584, 'When using FSDP on the nanoGPT model, the loss does not decrease' "
        "(https://github.com/intelligent-machine-learning/dlrover/issues/584), and in accelerate issue 3256 "
        "(https://github.com/huggingface/accelerate/issues/3256). What would have caught it: a test that each "
        "parameter of the model is one of the optimizer's, or that one step changes it."
    ),
    "08.bug8": (
        "OpenFlamingo un-freezes its decoder for FSDP1 and leaves it out of the optimizer; the comment on wrap_fsdp "
        "in open_flamingo/src/flamingo.py gives the reason, pytorch issue 95805 "
        "(https://github.com/pytorch/pytorch/issues/95805). Its clipping leaves the decoder out, so its norm stays "
        "right; the gradients are computed, sent and kept all the same. What would have caught it: the norm with a "
        "learning rate of 0, which must be the same in each step."
    ),
    "08.bug9": (
        "torch's switch is meant for such models: torchtitan pull request 4777, 'Fix FSDP hanging for multimodal "
        "models' (https://github.com/pytorch/torchtitan/pull/4777), uses it together with blank pictures. That it "
        "mixes the gradients of two units here was measured with torch 2.14.1; we found no report of it. What would "
        "have caught it: the gradients of the first step beside those of one process, as mmfsdp.verify compares "
        "them."
    ),
    "08.bug10": (
        "torch refuses it since 2.13: pytorch pull request 176257, 'Error on shared params in separate FSDP groups' "
        "(https://github.com/pytorch/pytorch/pull/176257). Before, a part of the table was not updated where its "
        "rows do not divide evenly: pytorch issue 176076 (https://github.com/pytorch/pytorch/issues/176076). Seen "
        "in accelerate pull request 4171 (https://github.com/huggingface/accelerate/pull/4171). What would have "
        "caught it: a test on two ranks that the two weights are equal, and changed, after a step; a plan's lint, "
        "too."
    ),
    "08.bug11": (
        "Seen in transformers pull requests 34191, 'Fix Gradient Accumulation issue' "
        "(https://github.com/huggingface/transformers/pull/34191), and 34373, 'enable average tokens across "
        "devices' (https://github.com/huggingface/transformers/pull/34373), and in torchtune pull request 1875, "
        "'Normalize CE loss by total number of (non-padding) tokens' "
        "(https://github.com/meta-pytorch/torchtune/pull/1875). What would have caught it: the same global batches "
        "on one rank and on two, with equal losses."
    ),
    "08.bug12": (
        "Seen in KempnerForge pull request 115, 'Fix optimizer momentum reset on checkpoint resume' "
        "(https://github.com/KempnerInstitute/KempnerForge/pull/115), and in Megatron-Bridge pull request 3397, "
        "'Fix a bug where Megatron-FSDP checkpoints are not active until after the optimizer step' "
        "(https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/3397). What would have caught it: stop, resume, and "
        "compare the losses of some steps with those of a run that was not stopped, to the last digit."
    ),
}
