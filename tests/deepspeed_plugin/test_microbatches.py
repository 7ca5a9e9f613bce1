"""What counts as read ahead of an iterator, around the loading of checkpoints."""

import pytest
import torch

from ds_basisrot.deepspeed_plugin.microbatches import Feeds


def test_right_after_loading_what_the_checkpoint_had_read_ahead_counts_until_an_iterator_comes():
    stream = ((torch.tensor(float(i)), None) for i in range(9))
    feeds = Feeds(lambda: next(stream))
    assert feeds.read_ahead() == []
    feeds.select(stream)
    feeds.fill(3, needed=1)
    ahead = feeds.read_ahead()
    assert [float(inputs) for inputs, _ in ahead] == [0.0, 1.0, 2.0]

    of_checkpoint = [(torch.tensor(7.0), None)]
    for restored in (of_checkpoint, []):
        feeds.restore(restored)  # a run that saves now, and one that resumes from there, stand where the checkpoint was
        assert feeds.read_ahead() == restored
    assert not feeds.select(stream)  # this run goes on with its iterator, of which something is at hand
    assert feeds.read_ahead() == ahead

    feeds.restore(of_checkpoint)
    other = iter(torch.arange(3.0))
    assert feeds.select(other) and feeds.read_ahead() == of_checkpoint
    assert feeds.settle(True) and feeds.read_ahead() == of_checkpoint


def test_what_a_checkpoint_had_read_ahead_outlives_a_loader_that_fails_once():
    fails = [True]

    def load():
        if fails:
            fails.pop()
            raise OSError("for a moment")
        return next(stream)

    stream = ((torch.tensor(float(i)), None) for i in range(8, 12))
    feeds = Feeds(load)
    feeds.restore([(torch.tensor(7.0), None)])
    feeds.select(stream)
    with pytest.raises(OSError):
        feeds.settle(None)
    assert not feeds.select(stream) and feeds.settle(None)
    assert [float(inputs) for inputs, _ in feeds.read_ahead()] == [7.0, 8.0]
