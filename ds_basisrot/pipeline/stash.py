"""How many versions of its weights a stage of the asynchronous pipeline keeps."""


def stash_versions(stage: int, stages: int, accumulation: int) -> int:
    """Copies of its weights that a stage with weight stashing holds at the most.

    Between the forward of microbatch m and its backward, tau = stages - 1 - stage others are forwarded, so the stage has tau + 1
    consecutive ones in flight. Every `accumulation` of them share a version. So many lie at most in ceil(tau / accumulation) + 1
    versions. The last stage, where each backward follows its forward, keeps none.

    Args:
        stage: 0-based.
        stages: of the pipeline.
        accumulation: microbatches per update.

    Raises:
        ValueError: an argument out of its range.
    """
    if not 0 <= stage < stages:
        raise ValueError(f"stage: must be at least 0 and below the number of stages ({stages}), got {stage}")
    if accumulation < 1:
        raise ValueError(f"accumulation: must be at least 1 (microbatches per update), got {accumulation}")
    staleness = stages - 1 - stage
    return -(-staleness // accumulation) + 1 if staleness else 0
