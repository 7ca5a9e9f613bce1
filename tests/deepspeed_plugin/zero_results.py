"""What cases of zero_worker.py ended with: loaded, and compared relative to how far the weights moved."""

import torch
from processes import run_cases


def run_zero(processes, cases, out, worker="zero_worker.py"):
    """Run cases in one job; returns what loads a case's results, a list in the order of the ranks."""
    run_cases(processes, cases, out, worker)
    return lambda name: [torch.load(out / name / f"rank_{rank}.pt") for rank in range(processes)]


def bitwise(ranks, others):
    """Whether two cases on equally many ranks have the same weights."""
    pairs = [(mine["weights"], theirs["weights"]) for mine, theirs in zip(ranks, others, strict=True)]
    return all(a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in pairs)


def distance(result, other):
    """Norm of the difference of the weights, relative to the norm of the other one's movement: the largest of all parameters that move."""
    assert result["weights"].keys() == other["weights"].keys()
    largest = 0.0
    for name, weight in result["weights"].items():
        difference = (weight - other["weights"][name]).norm().item()
        movement = (other["weights"][name] - other["before"][name]).norm().item()
        largest = max(largest, difference / movement if movement > 0.0 else float(difference > 0.0))
    return largest
