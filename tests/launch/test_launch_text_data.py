"""The text and its microbatches: what a run can rely on when it is repeated, resumed, or cut into replicas."""

import hashlib
import itertools

import pytest
import torch
from text_data import Text, held_out_batches, load_text, microbatch, standard_library_files, training_batches

CONTEXT = 16


@pytest.fixture
def text(tmp_path) -> Text:
    file = tmp_path / "text.txt"
    file.write_bytes(bytes(range(256)) * 40)
    return load_text([file], CONTEXT)


def equal(left, right) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_the_standard_library_is_the_default_and_reads_the_same_twice():
    text = load_text(None, CONTEXT)
    assert text.total_bytes > 1_000_000
    assert len(text.held_out) == 200_000
    assert text.sha256 == load_text(None, CONTEXT).sha256
    folders = {part for file in standard_library_files() for part in file.parts}
    assert not folders & {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings"}


def test_files_are_joined_in_their_order_and_the_last_twentieth_is_held_out(tmp_path):
    (tmp_path / "b").write_bytes(b"b" * 600)
    (tmp_path / "a").write_bytes(b"a" * 400)
    text = load_text([tmp_path / "b", tmp_path / "a"], CONTEXT)
    whole = b"b" * 600 + b"a" * 400
    assert text.train.tobytes() + text.held_out.tobytes() == whole
    assert len(text.held_out) == 50
    assert text.sha256 == hashlib.sha256(whole).hexdigest()


def test_a_microbatch_depends_on_seed_number_and_replica_and_on_nothing_else(text):
    torch.manual_seed(1)
    first = microbatch(text.train, CONTEXT, 4, seed=3, index=7, replica=1)
    torch.manual_seed(2)
    assert equal(first, microbatch(text.train, CONTEXT, 4, seed=3, index=7, replica=1))
    for other in ({"seed": 4}, {"index": 8}, {"replica": 0}):
        assert not equal(first, microbatch(text.train, CONTEXT, 4, **{"seed": 3, "index": 7, "replica": 1, **other}))


def test_labels_are_the_inputs_one_byte_later(text):
    inputs, labels = microbatch(text.train, CONTEXT, 4, seed=0, index=0, replica=0)
    assert inputs.shape == labels.shape == (4, CONTEXT)
    assert inputs.dtype == labels.dtype == torch.int64
    assert torch.equal(labels, (inputs + 1) % 256)  # the text counts upwards


def test_an_iterator_can_start_at_any_microbatch(text):
    from_start = itertools.islice(training_batches(text.train, CONTEXT, 4, seed=0, replica=1, first=0), 5, 8)
    from_there = itertools.islice(training_batches(text.train, CONTEXT, 4, seed=0, replica=1, first=5), 3)
    assert all(equal(left, right) for left, right in zip(from_start, from_there, strict=True))


def test_the_held_out_sequences_are_the_same_each_time_and_shared_out_among_replicas(text):
    def starts(replica, replicas, count):
        return [
            int(inputs[row, 0]) for inputs, _ in held_out_batches(text.held_out, CONTEXT, 2, replica, replicas, count) for row in (0, 1)
        ]

    alone = starts(0, 1, count=4)
    assert alone == starts(0, 1, count=4)
    assert sorted(alone) == sorted(starts(0, 2, count=2) + starts(1, 2, count=2))
    assert len(set(alone)) == 8


def test_the_shortest_text_that_is_accepted_gives_batches_from_both_parts(tmp_path):
    (tmp_path / "short").write_bytes(b"x" * (2 * CONTEXT + 2))
    text = load_text([tmp_path / "short"], CONTEXT)
    assert microbatch(text.train, CONTEXT, 4, 0, 0, 0)[1].shape == (4, CONTEXT)
    assert next(held_out_batches(text.held_out, CONTEXT, 4, 0, 1, 1))[1].shape == (4, CONTEXT)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), (b"", "no text in it"), (b"x" * (2 * CONTEXT + 1), "33 bytes.*17 bytes each.*--context 16")],
    ids=["missing", "empty", "too short"],
)
def test_a_text_that_cannot_be_used_is_refused_by_name(tmp_path, content, message):
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=f"--data.*{message}"):
        load_text([file], CONTEXT)
