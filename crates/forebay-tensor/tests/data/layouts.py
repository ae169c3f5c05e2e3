"""Writes layouts.json: what real DTensors hold on every place of many meshes.

    python layouts.py > layouts.json        (torch 2.11; a fake process group, no other process)

Each line of "dtensor" is one layout: shape, mesh, placements ("R", ["S", dim], ["SS", dim, split_factor]) and, for every
place on the mesh in row-major order, [sizes, offsets, elements]: sizes and offsets as
compute_local_shape_and_global_offset gives them to checkpoints, elements as a real DTensor made from arange() holds
them, flat and in order.

Each line of "fsdp_over_tp" is the same with the elements that FSDP2 over tensor parallelism holds: the mesh is (dp, tp),
the tensor is cut for tp first, each part then for dp, both by torch.chunk. The placements are those that FSDP2 records.
"""

import itertools
import json
import math
import random

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

BY_HAND = [
    ([], [4], ["R"]),
    ([], [2, 2], ["R", "R"]),
    ([6, 2], [4], [["S", 0]]),
    ([1], [3], [["S", 0]]),
    ([0, 3], [2], [["S", 0]]),
    ([0, 3], [2], [["S", 1]]),
    ([3, 0], [2, 2], [["S", 0], ["S", 0]]),
    ([9], [4, 2], [["SS", 0, 2], ["S", 0]]),
    ([8, 8], [2, 2], [["SS", 0, 2], ["S", 0]]),
    ([8, 8], [2, 2], [["S", 0], ["S", 0]]),
    ([16], [2, 2, 2], [["SS", 0, 4], ["S", 0], ["S", 0]]),
    ([16], [2, 2, 2], [["SS", 0, 2], ["SS", 0, 2], ["S", 0]]),
    ([8, 8], [2, 2], [["SS", 0, 2], ["SS", 1, 4]]),
    ([8], [2, 2], [["S", 0], ["SS", 0, 2]]),
    ([12], [1, 3], [["SS", 0, 4], ["S", 0]]),
    ([5], [2], [["SS", 0, 7]]),
]


def random_cases(rng, count):
    for _ in range(count):
        dims = rng.choice([1, 1, 2, 2, 2, 3])
        shape = [rng.choice([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16][1 if rng.random() < 0.9 else 0 :]) for _ in range(dims)]
        mesh = rng.choice([[1], [2], [3], [4], [7], [2, 2], [2, 3], [3, 2], [4, 2], [1, 4], [2, 2, 2], [3, 1, 2]])
        placements = []
        for _ in mesh:
            kind = rng.random()
            dim = rng.randrange(dims)
            if kind < 0.25:
                placements.append("R")
            elif kind < 0.75:
                placements.append(["S", dim])
            else:
                placements.append(["SS", dim, rng.choice([1, 2, 2, 3, 4, 8])])
        if math.prod(shape) <= 600:
            yield shape, mesh, placements


def placement_of(said):
    if said == "R":
        return Replicate()
    return Shard(said[1]) if said[0] == "S" else _StridedShard(said[1], split_factor=said[2])


def fill(cases):
    """Adds what each place holds, as a process with that rank sees it."""
    results = [[] for _ in cases]
    worlds = sorted({math.prod(mesh) for _, mesh, _ in cases})
    for world in worlds:
        for rank in range(world):
            dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
            for (shape, mesh, said), result in zip(cases, results):
                if math.prod(mesh) == world:
                    result.append(of_rank(shape, mesh, said))
            dist.destroy_process_group()
    return [list(case) + [result] for case, result in zip(cases, results)]


def of_rank(shape, mesh, said):
    mesh = DeviceMesh("cpu", torch.arange(math.prod(mesh)).view(mesh))
    placements = [placement_of(one) for one in said]
    whole = torch.arange(math.prod(shape)).view(shape)
    local = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
    sizes, offsets = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
    assert tuple(local.shape) == tuple(sizes), (shape, mesh, said, local.shape, sizes)
    return [list(sizes), list(offsets), local.flatten().tolist()]


def chunk(tensor, parts, dim, part):
    chunks = torch.chunk(tensor, parts, dim)
    return chunks[part] if part < len(chunks) else tensor.narrow(dim, 0, 0)


def fsdp_over_tp():
    for rows, (dp, tp) in itertools.product([1, 5, 8, 9, 12, 17], [(2, 2), (4, 2), (2, 3), (3, 4)]):
        whole = torch.arange(rows * 2).view(rows, 2)
        held = []
        for i, j in itertools.product(range(dp), range(tp)):
            local = chunk(chunk(whole, tp, 0, j), dp, 0, i)
            held.append([list(local.shape), None, local.flatten().tolist()])
        yield [[rows, 2], [dp, tp], [["SS", 0, tp], ["S", 0]], held]


def main():
    cases = BY_HAND + list(random_cases(random.Random(3), 420))
    parts = {"dtensor": fill(cases), "fsdp_over_tp": list(fsdp_over_tp())}
    print("{" + f'"torch": "{torch.__version__}"')
    for name, lines in parts.items():
        print(f',"{name}": [')
        print(",\n".join(json.dumps(line, separators=(",", ":")) for line in lines))
        print("]")
    print("}")


main()
