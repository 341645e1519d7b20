"""What compute-sanitizer watches of grouping: sums that are scattered and sent, and choices.

Only whole copies move between the CPU and a GPU: the sanitizer patches every module that a torch
kernel brings, and there are hundreds of kernels in each.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

import weft
from tests.rounds import Round, bits, combining
from weft.grouping.operator import ExpertGroups, Grouped

CASE = Round(tokens=(16, 9), top_k=5, experts=12, hidden=640, router="holes")
WAYS = (
    ("push", "scatter"),
    ("push", "send"),
    ("choices", "send"),
    ("fp8", "send"),
)


def rows_return(group: weft.Group) -> int:
    """Play every way twice; rows that are not FP8 must have the bits of the first. Collective."""
    x, ids, weights, _ = CASE.of(group.rank, torch.device("cpu"))
    given = [t.to(group.device) for t in (x, ids, weights)]
    wanted: torch.Tensor | None = None
    for way, sent in WAYS:
        with weft.AllToAll(
            group,
            **CASE.sizes(16),
            **combining(way),
            split_phase=True,
            timeout=200.0,
            first_timeout=200.0,
        ) as a2a:
            groups = ExpertGroups(a2a, align=8)
            for _ in range(2):
                grouped = groups.gather(a2a.dispatch(*given))
                send(a2a, groups, grouped, sent)
                out = a2a.combine_recv().cpu()
                wanted = out if wanted is None else wanted
                assert torch.isfinite(out.float()).all()
                assert way == "fp8" or torch.equal(bits(out), bits(wanted)), (way, sent)
            a2a.check()
            groups.close()
    return len(WAYS)


def send(a2a: weft.AllToAll, groups: ExpertGroups, grouped: Grouped, how: str) -> None:
    """Answer every row with the same random numbers, by its slot, and bring them on their way."""
    slots = 16 * a2a.group.size
    answers = torch.randn((slots, CASE.hidden), generator=torch.Generator().manual_seed(a2a.rank))
    y = answers.bfloat16()[grouped.slot.cpu().long().clamp_min(0)].to(a2a.group.device)
    if how == "scatter":
        groups.scatter(y)
        a2a.combine_send()
    else:
        groups.send(y)


def met() -> weft.Group:
    """The ranks that a test started with torchrun's variables."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")
    return weft.Group.from_torch(timeout=300.0)


def main() -> None:
    """One rank of them."""
    with met() as group:
        rows_return(group)
    print("sound")
