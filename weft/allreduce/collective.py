"""The fused all-reduce on torch.distributed: the same bits, to compare the other backends with.

It also serves calls of more tokens than those that were built have slots for. Its ranks share a
host, too: an AllReduce always makes a heap.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from weft.allreduce.call import Checked, Reduced
from weft.allreduce.reference import allreduce_fused, finalize_moe
from weft.memory import Group
from weft.memory.collective import all_gather


class CollectiveReduce:
    """Rows to their owners by all-to-all, summed there in rank order, gathered, finished in torch.

    An all-reduce of the library itself would add in an order of its own, and so give other bits.
    """

    def __init__(self, group: Group) -> None:
        self._size, self._process_group = group.size, group.process_group()

    def run(self, checked: Checked) -> None:
        """Fill the outputs of a call."""
        call = checked.call
        x = finalize_moe(call.prologue) if call.prologue is not None else call.x
        assert x is not None
        made = allreduce_fused(
            [self._sum(x)], call.residual, call.weight, call.eps, call.weight_bias, call.quant
        )
        _copy(made, checked.reduced)

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, rounded once."""
        tokens, hidden = x.shape
        each = -(-tokens // self._size)
        padded = torch.nn.functional.pad(x, (0, 0, 0, each * self._size - tokens))
        sent = padded.view(each, self._size, hidden).transpose(0, 1).contiguous()
        came = torch.empty_like(sent)
        _exchange(_bytes(came), _bytes(sent), self._process_group)
        mine = allreduce_fused(list(came.unbind(0))).out
        assert mine is not None
        gathered = torch.empty_like(sent)
        all_gather(_bytes(gathered), _bytes(mine), group=self._process_group)
        return gathered.transpose(0, 1).reshape(each * self._size, hidden)[:tokens]


def _exchange(to: torch.Tensor, what: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_to_all_single(to, what, group=group)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _copy(made: Reduced, wanted: Reduced) -> None:
    for name in ("out", "residual", "norm", "quant", "scale"):
        to = getattr(wanted, name)
        if to is not None:
            to.copy_(getattr(made, name))
