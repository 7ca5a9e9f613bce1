"""Options that no list puts together: the real engine equals the simulator, and a resumed run the one that went on, in random cases."""

import os
import random

import pytest
import torch
from models import BATCH
from processes import run_cases
from simulate import TIED, largest_difference, load, simulate

MAX_DIFFERENCE = 1e-6

SEED, NUMBER = int(os.environ.get("DS_BASISROT_TEST_SEED", "1")), int(os.environ.get("DS_BASISROT_TEST_CASES", "30"))

PRECISIONS = (
    {},
    {},
    {"zero_optimization.stage": 1},
    {"bf16.enabled": True},
    {"bf16.enabled": True, "zero_optimization.stage": 1},
    {"bf16.enabled": True, "zero_optimization.stage": 1, "data_types.grad_accum_dtype": "fp32"},
)


def random_case(rng, name, stages, replicas):
    """A case for the engine and the simulator; options that refuse each other are not put together."""
    precision = rng.choice(PRECISIONS)
    exact_clipping = "bf16.enabled" not in precision  # there DeepSpeed rounds in its own way
    optimizer = rng.choice(["AdamW", "BasisRotation", "BasisRotation", "SGD", "NAdam"])
    if precision and optimizer in ("SGD", "NAdam"):
        precision = {**precision, "zero_allow_untested_optimizer": True}
    config = {**precision, "optimizer.params.lr": 1e-2}
    case = {"name": name, "stages": stages, "optimizer": optimizer, "gas": rng.choice([1, 1, 2, 3, 5]), "updates": rng.randint(5, 12)}
    if optimizer == "BasisRotation":
        config |= {
            "optimizer.params.geometry": rng.choice(["bilateral", "unilateral", "auto"]),
            "optimizer.params.source": rng.choice(["second_order", "first_order"]),
            "optimizer.params.refresh_period": rng.randint(1, 4),
            "optimizer.params.refresh_allocation": rng.choice(["uniform", "stage_aware", "inverse"]),
            "optimizer.params.state_dtype": rng.choice(["float32", "float32", "bfloat16"]),
        }
    if exact_clipping and not (precision and optimizer != "AdamW") and rng.random() < 0.5:
        case["clip"] = 0.05
        config["pipeline.clip_scope"] = rng.choice(["lagged_global", "stage"])
    case["stashing"] = rng.random() < 0.75
    if "data_types.grad_accum_dtype" in precision:
        case["gas"], case["tied"] = min(case["gas"], 2), False  # the simulator adds up in bfloat16
    else:
        case["tied"] = rng.random() < 0.25
    if case["stashing"] and rng.random() < 0.25:
        config["pipeline.delay_compensation"] = 0.5
    if case["stashing"] and not precision and optimizer in ("AdamW", "BasisRotation") and rng.random() < 0.25:
        config["pipeline.weight_prediction"] = True
    if not case["tied"] and rng.random() < 0.25:
        config["pipeline.lr_correction_updates"] = rng.randint(1, 9)
    if not case["tied"] and rng.random() < 0.3:
        case["dropout"] = 0.3
    elif case["stashing"] and rng.random() < 0.3:  # else activations are recomputed on the newest weights
        case["checkpoint_activations"] = rng.choice([1, 2])
    if not case["tied"] and "bf16.enabled" not in precision and rng.random() < 0.2:
        case["tuples"] = True
    case["scheduler"] = rng.random() < 0.3
    case["eval_after"] = [u for u in range(1, case["updates"] + 1) if rng.random() < 0.15]
    if "dropout" not in case and rng.random() < 0.4:  # the simulator does not draw anew what is forwarded anew
        case["save_after"] = rng.randint(1, case["updates"] - 1)
    elif "dropout" not in case and "data_types.grad_accum_dtype" not in precision and rng.random() < 0.3:
        case["batch_size_after"] = [rng.randint(1, case["updates"] - 1), BATCH * replicas * rng.randint(1, 4)]
    return {**case, "config": config}


def random_cases(processes):
    """Cases on so many processes, each with the one that resumes it where it saves."""
    rng = random.Random(f"{SEED} {processes}")
    cases = []
    for number in range(NUMBER):
        # at most two replicas: more of them add up in another order
        stages = rng.choice([s for s in range(2, processes + 1) if processes % s == 0 and processes // s <= 2])
        case = random_case(rng, f"random-{number}", stages, processes // stages)
        cases.append(case)
        if case.get("save_after"):
            cases.append({**case, "name": f"{case['name']}-resumed", "save_after": None, "load": case["name"]})
    return cases


pytestmark = [pytest.mark.full, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize("processes", [2, 3, 4, 8])
def test_random_cases(tmp_path, processes):
    cases = random_cases(processes)
    run_cases(processes, cases, tmp_path, timeout=60 + 10 * len(cases))
    wrong = []
    for case in cases:
        ranks = load(tmp_path, case["name"])
        if case.get("load"):
            continue
        weights, losses = simulate({**case, "replicas": processes // case["stages"]})
        far = largest_difference(ranks, weights)
        if far > MAX_DIFFERENCE or any(r["losses"] != pytest.approx(losses, abs=MAX_DIFFERENCE) for r in ranks):
            wrong.append(f"differs by {far} from the simulator: {case}")
        copies = [r["weights"][TIED] for r in ranks if TIED in r["weights"]]
        if not all(torch.equal(copy, copies[0]) for copy in copies):
            wrong.append(f"tied copies differ: {case}")
        if not case.get("save_after"):
            continue
        for whole, resumed in zip(ranks, load(tmp_path, f"{case['name']}-resumed")):
            same = all(torch.equal(w, resumed["weights"][name]) for name, w in whole["weights"].items())
            if not same or resumed["losses"] != whole["losses"][case["save_after"] :]:
                wrong.append(f"resumed differs from uninterrupted: {case}")
                break
    assert not wrong, "\n".join(wrong)
