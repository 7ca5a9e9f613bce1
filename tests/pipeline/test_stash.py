"""The number of versions a stage keeps follows from which version each microbatch sees."""

import pytest

from ds_basisrot.pipeline.stash import stash_versions


def most_versions_in_flight(stage, stages, accumulation):
    """Counted: microbatch m sees floor(max(0, m - tau) / a), and when it is forwarded, those from m - tau on wait for their backward."""
    tau = stages - 1 - stage
    sees = [max(0, m - tau) // accumulation for m in range(4 * (tau + accumulation))]
    return max(len(set(sees[max(0, m - tau) : m + 1])) for m in range(len(sees)))


@pytest.mark.parametrize("accumulation", [1, 2, 3, 4, 7, 8, 20])
def test_every_stage_but_the_last_keeps_the_versions_of_its_microbatches_in_flight(accumulation):
    for stages in range(2, 10):
        for stage in range(stages - 1):
            assert stash_versions(stage, stages, accumulation) == most_versions_in_flight(stage, stages, accumulation)


@pytest.mark.parametrize("stages", [1, 2, 8])
def test_the_last_stage_keeps_none(stages):
    assert stash_versions(stages - 1, stages, 1) == 0


def test_two_versions_are_enough_with_a_pipelines_length_of_microbatches_per_update():
    assert [stash_versions(stage, 4, 3) for stage in range(4)] == [2, 2, 2, 0]
    assert [stash_versions(stage, 4, 1) for stage in range(4)] == [4, 3, 2, 0]


@pytest.mark.parametrize(("arguments", "named"), [((4, 4, 1), "stage: "), ((-1, 4, 1), "stage: "), ((0, 4, 0), "accumulation: ")])
def test_an_argument_out_of_range_is_named(arguments, named):
    with pytest.raises(ValueError, match=named):
        stash_versions(*arguments)
