"""Garbage is collected between steps only, and Python's own collections are on again after a training."""

import gc
import weakref

import pytest
from ranks import fake_group

from mmfsdp.kit.train.callbacks import CALLBACKS, Callbacks
from mmfsdp.kit.train.garbage import COLLECT_ALL_EVERY, GarbageCollection
from mmfsdp.params.enums import imported


class Cycle:
    def __init__(self):
        self.itself = self


def test_garbage_is_collected_after_each_step_and_what_is_old_after_some():
    assert imported(CALLBACKS["garbage collection"]) is GarbageCollection
    with fake_group(2), pytest.raises(ZeroDivisionError):
        callbacks = Callbacks({"garbage collection": GarbageCollection(None)})
        assert gc.isenabled()
        with callbacks.around_training():
            assert not gc.isenabled()
            old = Cycle()
            for step in (1, 2):  # a collection that an object survives makes it older
                new = weakref.ref(Cycle())
                assert new() is not None
                callbacks.after_step(step)
                assert new() is None
            kept, old = weakref.ref(old), None
            callbacks.after_step(3)
            assert kept() is not None
            callbacks.after_step(COLLECT_ALL_EVERY)
            assert kept() is None
            raise ZeroDivisionError
    assert gc.isenabled()
