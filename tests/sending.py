# SPDX-License-Identifier: Apache-2.0
"""Rounds that return results in two ways, which must agree bit by bit."""

import ctypes
from collections.abc import Callable

import torch

import weft
from tests.rounds import Round, synchronize
from weft.grouping.operator import ExpertGroups, Grouped

Return = Callable[[weft.AllToAll, ExpertGroups, torch.Tensor], None]


def make(group: weft.Group, case: Round, **options: object) -> weft.AllToAll:
    sizes = case.sizes(16) | {"split_phase": True}
    return weft.AllToAll(group, dtype=case.dtype, **sizes | options)


def results(groups: ExpertGroups, grouped: Grouped, seed: int, dtype: torch.dtype) -> torch.Tensor:
    d = grouped.x.device
    generator = torch.Generator().manual_seed(seed)
    y = torch.randn(groups.y_shape, generator=generator).to(d, dtype)
    return torch.where((grouped.slot >= 0)[..., None], y, torch.nan)


def poison(a2a: weft.AllToAll) -> None:
    shape, heap = a2a.config.shape, a2a.heap
    size = shape.returned_rows * shape.returned_bytes
    synchronize(a2a.group.device)
    a2a.group.barrier()  # the peers' last rows are summed
    heap.tensor((size,), torch.uint8, offset=a2a.config.offsets.returned).fill_(0xFF)
    a2a.output_buffer.fill_(float("nan"))
    synchronize(a2a.group.device)
    a2a.group.barrier()


def round_trip(
    a2a: weft.AllToAll, groups: ExpertGroups, case: Round, give_back: Return
) -> torch.Tensor:
    x, ids, weights, add = case.inputs_of(a2a.rank, a2a.group.device)
    if a2a.config.shape.combine != "pull":
        poison(a2a)
    grouped = groups.gather(a2a.dispatch(x, ids, weights))
    give_back(a2a, groups, results(groups, grouped, case.seed + 31 * a2a.rank, case.dtype))
    out = torch.full_like(x, float("nan"))
    return a2a.combine_recv(out=out, add=add if case.add else None)


def return_by_scatter(a2a: weft.AllToAll, groups: ExpertGroups, y: torch.Tensor) -> None:
    groups.scatter(y)
    a2a.combine_send()


def return_by_store(a2a: weft.AllToAll, groups: ExpertGroups, y: torch.Tensor) -> None:
    """Return results as a caller's kernel that stores rows at their owners."""
    addresses, rows = groups._grouped.dst_addr, y.view(-1, y.shape[-1])
    assert addresses is not None
    size = y.shape[-1] * y.element_size()
    for row, address in enumerate(addresses.flatten().tolist()):
        if address:
            ctypes.memmove(address, rows[row].data_ptr(), size)
    groups.sent()


def return_by_send(a2a: weft.AllToAll, groups: ExpertGroups, y: torch.Tensor) -> None:
    groups.send(y)
