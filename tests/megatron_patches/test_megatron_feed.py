"""What a forward has read is kept until its microbatch is trained, and comes again in the same order."""

import copy
import types

import pytest

from megatron_patches.feed import Feed


def read(feed, microbatch, items=1):
    feed.begin(microbatch)
    return [next(feed) for _ in range(items)]


def test_a_microbatch_that_begins_anew_reads_the_same():
    feed = Feed(iter(range(10)))
    assert [read(feed, m) for m in (0, 1, 2)] == [[0], [1], [2]]
    feed.trained(1)
    assert [read(feed, m) for m in (1, 2, 3)] == [[1], [2], [3]]


def test_a_microbatch_may_read_several_items_and_more_the_second_time():
    feed = Feed(iter(range(10)))
    assert read(feed, 0, 2) == [0, 1] and read(feed, 1, 3) == [2, 3, 4]
    assert read(feed, 0, 2) == [0, 1] and read(feed, 1, 4) == [2, 3, 4, 5]
    assert read(feed, 2) == [6]


def test_what_was_read_is_the_same_object():
    batch = {"tokens": object()}
    feed = Feed(iter([batch]))
    assert read(feed, 0)[0] is batch and read(feed, 0)[0] is batch


def test_the_end_of_the_data_comes_again():
    feed = Feed(iter([5]))
    assert read(feed, 0) == [5]
    for _ in range(2):
        feed.begin(1)
        with pytest.raises(StopIteration):
            next(feed)
    assert read(feed, 0) == [5]


def test_what_is_trained_is_forgotten():
    feed = Feed(iter(range(10)))
    for m in range(4):
        read(feed, m)
    assert feed.reads_ahead
    feed.trained(3)
    assert feed.reads_ahead and read(feed, 3) == [3]
    feed.trained(4)
    assert not feed.reads_ahead
    assert read(feed, 4) == [4]


def test_nothing_read_is_nothing_ahead():
    feed = Feed(iter([]))
    feed.begin(0)
    with pytest.raises(StopIteration):
        next(feed)
    assert not feed.reads_ahead
    assert not Feed(None).reads_ahead and Feed(None).source is None


def test_a_script_sees_its_iterators_attributes():
    source = types.SimpleNamespace(position=7, __next__=None)
    feed = Feed(source)
    assert iter(feed) is feed and feed.position == 7
    with pytest.raises(AttributeError):
        _ = feed.no_such_thing
    assert copy.copy(Feed(source)).position == 7
