"""Cases for real processes: units whose elements are numbered, moved to their owners and back, beside the slow obvious way."""

import random

import torch
import torch.distributed as dist

from ds_basisrot.sharding.exchange import Exchange, messages
from ds_basisrot.sharding.layouts import LAYOUTS, one_buffer
from ds_basisrot.sharding.units import Unit, units_of

DEVICE = torch.device("cpu")


def run_all(rank, ranks, folder, cases):
    """What each process does: `cases` are names of functions here, which check and return what they saw; rank 0 saves it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    seen = {name: globals()[name](rank, ranks) for name in cases}
    gathered = [None] * ranks
    dist.all_gather_object(gathered, seen)
    if rank == 0:
        torch.save(gathered, f"{folder}/seen.pt")
    dist.destroy_process_group()


def whole(unit):
    """The elements of a unit, the same on every rank and different in every place."""
    return torch.arange(unit.numel, dtype=torch.float32) + 1000.0 * sum(map(ord, unit.name))


def slices_of(units, rank):
    """This rank's slices of the moving units."""
    pieces = [(unit, piece) for unit in units if not unit.stays for piece in unit.pieces if piece.rank == rank]
    return {unit.name: whole(unit)[piece.offset : piece.offset + piece.numel].clone() for unit, piece in pieces}


def slow_gather(units, rank, slices):
    """The twin: everybody tells everybody everything; an owner puts its units together element by element."""
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, {name: values.tolist() for name, values in slices.items()})
    wholes = {}
    for unit in units:
        if unit.owner == rank and not unit.stays:
            elements = [None] * unit.numel
            for piece in unit.pieces:
                for place in range(piece.numel):
                    elements[piece.offset + place] = told[piece.rank][unit.name][place]
            wholes[unit.name] = elements
    return wholes


class Counting:
    """Counts messages, and the elements that this rank gives to others in them."""

    def __enter__(self):
        self.messages, self.elements, self._send = 0, 0, dist.all_to_all_single

        def counted(received, sent, *arguments, **options):
            self.messages += 1
            self.elements += sent.numel()
            return self._send(received, sent, *arguments, **options)

        dist.all_to_all_single = counted
        return self

    def __exit__(self, *_):
        dist.all_to_all_single = self._send


def there_and_back(units, rank):
    """Exchange all units in one message each way; what was counted."""
    exchange, slices = Exchange(units, None, DEVICE), slices_of(units, rank)
    with Counting() as counting:
        wholes = exchange.gather(slices).wait()
        assert {name: values.tolist() for name, values in wholes.items()} == slow_gather(units, rank, slices)
        assert all(torch.equal(wholes[unit.name], whole(unit)) for unit in units if unit.name in wholes)
        back = exchange.scatter({name: -values for name, values in wholes.items()}).wait()
    assert set(back) == set(slices)
    assert all(torch.equal(back[name], -values) for name, values in slices.items())
    given = sum(piece.numel for unit in units for piece in unit.pieces if piece.rank == rank != unit.owner)
    brought = sum(unit.moving for unit in units if unit.owner == rank)
    assert counting.elements == given + brought
    return counting.messages


def owned(units, owners):
    for unit, owner in zip(units, owners):
        unit.owner = owner
    return units


def matrices(numels, stage, ranks):
    pieces = LAYOUTS[stage](numels, ranks)
    return [Unit(f"m{index}", (1, numel), None, own) for index, (numel, own) in enumerate(zip(numels, pieces))]


def random_units(rank, ranks):
    """Any sizes, both layouts, any owners."""
    rng, counts = random.Random(ranks), []
    for case in range(30):
        units = matrices([rng.randint(1, 200) for _ in range(rng.randint(1, 12))], 1 + 2 * (case % 2), ranks)
        counts.append(there_and_back(owned(units, [rng.randrange(ranks) for _ in units]), rank))
    return counts


def one_owner(rank, ranks):
    """The last rank owns everything; in the flat buffer of one small and one large matrix the others are empty, or hold much."""
    return [there_and_back(owned(matrices(numels, 1, ranks), [ranks - 1] * 3), rank) for numels in ([500, 3, 2], [3, 2, 500], [1, 1, 1])]


def empty_ranks(rank, ranks):
    """Fewer elements than ranks: some hold nothing, and one that holds nothing owns everything."""
    return there_and_back(owned(matrices([1, 2], 3, ranks), [ranks - 1] * 2), rank)


def what_stays(rank, ranks):
    """Units that their owner holds whole pass through no message."""
    units = matrices([8] * (2 * ranks), 1, ranks)
    return there_and_back(owned(units, [unit.pieces[0].rank for unit in units]), rank)


def some_stay(rank, ranks):
    """Of two units of the first rank one goes to the last."""
    return there_and_back(owned(matrices([8, 8] * ranks, 1, ranks), [0, ranks - 1] + [unit // 2 for unit in range(2, 2 * ranks)]), rank)


class StackRole:
    """As much of a role as units of a stack look at."""

    class Stack:
        class part:
            kind = "stack"

    stacks = (Stack,)

    def of_one(self, index):
        return self


def stacks(rank, ranks):
    """The matrices of a stack, one by one, each on another owner."""
    before, stack = one_buffer([7, 6 * 20], ranks)
    units = units_of("experts", (6, 4, 5), StackRole(), stack)
    assert len(units) == 6
    return there_and_back(owned(units, [index % ranks for index in range(6)]), rank)


def several_under_way(rank, ranks):
    """Messages may be started before earlier ones have arrived, and gathering and scattering may overlap."""
    units = owned(matrices([60, 50, 40, 30, 20, 10], 3, ranks), [index % ranks for index in range(6)])
    groups = messages(units, 60)
    exchanges = [Exchange(group, None, DEVICE) for group in groups]
    slices = slices_of(units, rank)
    gathering = [exchange.gather(slices) for exchange in exchanges]
    scattering = []
    for exchange, arriving in zip(exchanges, gathering):
        scattering.append(exchange.scatter({name: 2 * values for name, values in arriving.wait().items()}))
    back = {name: values for each in scattering for name, values in each.wait().items()}
    assert set(back) == set(slices)
    assert all(torch.equal(back[name], 2 * values) for name, values in slices.items())
    return len(groups)


def strange_defaults(rank, ranks):
    """What moves is float32 on the slices' device, whatever a program has set for new tensors."""
    torch.set_default_dtype(torch.float64)
    try:
        units = owned(matrices([30, 20], 3, ranks), [0, ranks - 1])
        exchange = Exchange(units, None, DEVICE)
        wholes = exchange.gather(slices_of(units, rank)).wait()
        assert all(values.dtype == torch.float32 for values in wholes.values())
        exchange.scatter(wholes).wait()
    finally:
        torch.set_default_dtype(torch.float32)
