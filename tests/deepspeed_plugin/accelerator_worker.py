"""zero_worker.py with updates decided as on an accelerator: hosts do not look at gradients, unless a matrix of their rank is cold."""

import zero_worker

from ds_basisrot.optim.state import COLD
from ds_basisrot.optim.updates import MatrixUpdates


def host_decides(updates, work, device):
    states = [updates.state.get(p) for _, p in work]
    return any(not state or any(value for key, value in state.items() if key.rpartition(".")[2] == COLD) for state in states)


if __name__ == "__main__":
    MatrixUpdates._host_decides = host_decides
    zero_worker.main()
