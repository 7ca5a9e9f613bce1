"""The cases of test_zero.py for zero_worker.py: which to compare with which, and how closely."""

STAGES = (0, 1, 2, 3)
FP32_SUMS = {"data_types.grad_accum_dtype": "fp32"}
STATIC_SCALE = {"fp16.loss_scale": 1024}
AUTOCAST = {"torch_autocast.enabled": True, "torch_autocast.dtype": "bfloat16"}
BAD = {"0": ["blocks.1.out.weight", float("inf")], "4": ["norm.weight", float("nan")]}  # at the first update, and at a later one
MIXED = {"mixture": "stacked", "model": {"tied": True, "frozen": ["blocks.0.out", "norm"]}}
# Two matrices, one of them rotated as three
TINY = {"depth": 1, "width": 4, "heads": 1, "inner": 6, "frozen": ["blocks.0.gate", "blocks.0.up", "blocks.0.down", "extra"]}


def cases(name, stages, equals=None, close_to=None, **changes):
    """One case for each stage, with the name of another one that it must be like ("...": the first of these)."""
    made = [{"name": f"{name}-{stage}", "stage": stage, "updates": 8, **changes} for stage in stages]
    for case in made:
        for how, reference in (("equals", equals), ("close_to", close_to)):
            if reference is not None:
                case[how] = made[0]["name"] if reference == "..." else reference
    return made


ONE = [*cases("fp32", (0, 3), equals="...", updates=30)]
# Two summands have one sum, whatever the order. Autocast comes last: it stays switched on in the process.
TWO = [
    *cases("fp32", STAGES, equals="...", updates=30),
    *cases("bf16", (0, 1, 3), equals="...", precision="bf16"),
    *cases("bf16-fp32-sums", (1,), equals="bf16-0", precision="bf16", config=FP32_SUMS),
    *cases("short", (0,)),
    *cases("balanced", (1,), equals="short-0", zero={"round_robin_gradients": True, "overlap_comm": True, "parameter_alignment": True}),
    *cases("other-sums", (2,), equals="short-0", zero={"reduce_bucket_size": 500, "reduce_scatter": False, "contiguous_gradients": False}),
    *cases("sub-groups", (3,), equals="short-0", zero={"sub_group_size": 1, "stage3_param_persistence_threshold": 0}),
    *cases("init", (3,), equals="short-0", zero_init=True, zero={"sub_group_size": 100, "overlap_comm": False}),
    *cases("groups", (0, 1, 3), equals="...", groups="with an empty one", scheduler=[1e-2, 5e-3]),
    *cases("clipped", (0, 3), close_to="...", clip=0.1, groups="two"),
    *cases("accumulated", (0,), gas=3),
    *cases("boundary", (1,), equals="accumulated-0", gas=3, partial_steps="boundary"),
    *cases("boundary", (3,), close_to="accumulated-0", gas=3, partial_steps="boundary"),
    *cases("no-sync", (0, 1), equals="...", gas=3, partial_steps="no_sync"),
    *cases("coalesced", (3,), equals="no-sync-0", gas=3, partial_steps="coalesced"),
    *cases("mixed", (0, 3), equals="...", **MIXED),
    *cases("without-bad", (0,), leave_out=[0, 4]),
    *cases("bad", (0, 1, 3), equals="without-bad-0", spoil=BAD),
    *cases("bf16-without-bad", (1,), precision="bf16", config=FP32_SUMS, leave_out=[0, 4]),
    *cases("bf16-bad", (1,), equals="bf16-without-bad-1", precision="bf16", config=FP32_SUMS, spoil=BAD),
    *cases("unchecked-bad", (2,), equals="bf16-without-bad-1", precision="bf16", config={"bf16.check_grad_overflow": False}, spoil=BAD),
    *cases("unused-here", (0,), precision="bf16", unused_on=[1]),
    *cases("unused-here-fp32-sums", (1,), equals="unused-here-0", precision="bf16", config=FP32_SUMS, unused_on=[1]),
    *cases("late", (0, 3), equals="...", unused_on=[0, 1], unused_until=4),
    *cases("fp16-without-bad", (1,), precision="fp16", config=STATIC_SCALE, leave_out=[0, 4]),
    *cases("fp16-bad", (1, 3), equals="fp16-without-bad-1", precision="fp16", config=STATIC_SCALE, spoil=BAD),
    *cases("sent-as-bf16", (0, 1), equals="...", config={"communication_data_type": "bf16"}),
    *cases("autocast", (3,), config=AUTOCAST),
]
FOUR = [
    *cases("fp32", (0, 3), close_to="...", updates=30),
    *cases("few-matrices", (0,), model=TINY),
    *cases("few-matrices", (1,), equals="few-matrices-0", model=TINY, zero={"round_robin_gradients": True}),
    *cases("few-matrices", (3,), close_to="few-matrices-0", model=TINY, zero={"sub_group_size": 1}),
]
SHORT = [(1, ONE), (2, TWO), (4, FOUR)]  # jobs: ranks and cases

# Every option by itself, at every stage that has it, in every precision.
OPTIONS = [
    ("round-robin", (1, 2), {"zero": {"round_robin_gradients": True}}),
    ("overlap", (1, 2, 3), {"zero": {"overlap_comm": True}}),
    ("no-overlap", (1, 2, 3), {"zero": {"overlap_comm": False}}),
    ("scattered", (1, 2, 3), {"zero": {"contiguous_gradients": False}}),
    ("no-reduce-scatter", (1, 2, 3), {"zero": {"reduce_scatter": False}}),
    ("small-buckets", (1, 2, 3), {"zero": {"reduce_bucket_size": 500, "allgather_bucket_size": 500}}),
    ("aligned", (1, 2), {"zero": {"parameter_alignment": True}}),
    ("no-norm", (2,), {"zero": {"compute_grad_norm": False}}),
    ("sub-groups", (3,), {"zero": {"sub_group_size": 100}}),
    ("smallest-sub-groups", (3,), {"zero": {"sub_group_size": 1}}),
    ("nothing-stays", (3,), {"zero": {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}}),
    ("second-copy", (3,), {"zero": {"zero_hpz_partition_size": 2}}),
    ("init", (3,), {"zero_init": True}),
    ("groups", (1, 2, 3), {"groups": "two", "params": {"weight_decay": 0.0}}),
    ("mixed", (1, 2, 3), MIXED),
    ("late", (1, 2, 3), {"unused_on": [0, 1], "unused_until": 4}),
    ("without-bad", (1, 2, 3), {"leave_out": [0, 4]}),
    ("bad", (1, 2, 3), {"spoil": BAD}),
]
PRECISIONS = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "bf16-fp32-sums": {"precision": "bf16", "config": FP32_SUMS},
    "fp16": {"precision": "fp16", "config": STATIC_SCALE},
}
# What changes the training itself, and whose cases are therefore compared among themselves.
OF_THEIR_OWN = {"groups": "groups", "mixed": "mixed", "late": "late", "without-bad": "without-bad", "bad": "without-bad"}


def _like(kind, option):
    return f"{kind}-{OF_THEIR_OWN[option]}-1" if option in OF_THEIR_OWN else f"{kind}-plain-1"


LONG_TWO = [
    [
        case
        for name, stages, option in [("plain", (1, 2, 3), {}), *OPTIONS]
        for case in cases(f"{kind}-{name}", stages, equals=_like(kind, name), **precision, **option)
    ]
    for kind, precision in PRECISIONS.items()
]
OTHERS_TWO = [
    *cases("no-sync", (0, 1), equals="...", gas=3, partial_steps="no_sync"),
    *cases("coalesced", (1, 2, 3), equals="no-sync-0", gas=3, partial_steps="coalesced"),
    *cases("unmanaged", STAGES, equals="...", config={"managed_gradient_accumulation": False}),
    *cases("clipped", STAGES, close_to="...", clip=0.1),
    *cases("autocast", (1, 2, 3), equals="...", config=AUTOCAST),
]
# In bf16, DeepSpeed also sums in bf16, where four summands make another sum in another order.
LONG_FOUR = [
    *cases("fp32", STAGES, close_to="...", updates=30),
    *cases("bf16", STAGES, equals="...", precision="bf16", config={"communication_data_type": "fp32"}),
    *cases("clipped", STAGES, close_to="...", clip=0.1),
    *cases("groups", STAGES, close_to="...", groups="with an empty one", scheduler=[1e-2, 5e-3]),
    *cases("mixed", STAGES, close_to="...", **MIXED),
    *cases("few-matrices", STAGES, close_to="...", model=TINY),
    *cases("second-copy", (3,), close_to="...", zero={"zero_hpz_partition_size": 2}),
]
LONG = [*((2, each) for each in [*LONG_TWO, OTHERS_TWO]), (4, LONG_FOUR)]
