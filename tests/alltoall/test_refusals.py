# SPDX-License-Identifier: Apache-2.0
"""Invalid input beside that of test_arguments.py is refused, or dropped and reported."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

import weft
from tests import lowlatency_rounds as low
from tests.compat.calls import refused
from tests.lowlatency_rounds import Mode
from tests.ranks import on_ranks
from tests.rounds import MARK, Round, play, synchronize
from weft import errors
from weft.errors import BadExpertId, GeometryMismatch, InvalidArgument, OutOfOrder, TokenOverflow

SIZES: dict[str, Any] = {"max_tokens": 8, "top_k": 2, "num_experts": 4, "hidden": 16}


@on_ranks(2, "cpu", "cuda")
def test_invalid_input_is_refused_on_the_host(group):
    d = group.device
    x = torch.zeros((3, 16), dtype=torch.bfloat16, device=d)
    ids = torch.tensor([[0, 1], [2, 3], [1, -1]], dtype=torch.int32, device=d)
    flat = torch.zeros(16 * 4 + 1, dtype=x.dtype, device=d)
    many, nine = torch.zeros((9, 16), dtype=x.dtype, device=d), ids.repeat(3, 1)
    with weft.AllToAll(group, **SIZES, split_phase=True) as a2a:
        send = a2a.dispatch
        refused(InvalidArgument, lambda: send(x, ids[:, :1].contiguous()), "[3, 1]", "2")
        refused(InvalidArgument, lambda: send(x[:2], ids), "[2, 16]", "[3, 16]")
        refused(InvalidArgument, lambda: send(flat[1:49].view(3, 16), ids), "16 bytes", "clone")
        refused(TokenOverflow, lambda: send(many, nine), "9 tokens", "max_tokens=8")
        stats = torch.zeros(7, dtype=torch.int32, device=d)
        words = "stats is [7]", "stats=0", "leave it out"
        for call in (send, a2a.dispatch_send):
            refused(InvalidArgument, partial(call, x, ids, stats=stats), *words)
        refused(OutOfOrder, a2a.combine, "combine out of order", "expects dispatch")
        send(x, ids, torch.ones((3, 2), device=d))
        refused(OutOfOrder, lambda: send(x, ids), "3 tokens are dispatched")
        inside = a2a.output()[1, :3]
        refused(InvalidArgument, lambda: a2a.combine(out=inside), "out is in the symmetric memory")
        a2a.combine()
        a2a.check()
    refused(OutOfOrder, a2a.output, "closed")
    refused(OutOfOrder, lambda: a2a.dispatch(x, ids), "closed")
    a2a.close()


@on_ranks(1, "threads")
def test_a_receiver_needs_single_rows(group):
    for combine in (None, "push"):
        call = partial(weft.AllToAll, group, reduce="receiver", combine=combine, **SIZES)
        refused(InvalidArgument, call, "reduce is 'receiver'", "use combine='gemm_push'")


@on_ranks(3, "threads")
def test_ranks_that_disagree_raise_at_creation(group):
    for name, one, other in (("hidden", 16, 32), ("stats", 5, 6)):
        sizes = {**SIZES, name: other if group.rank == 1 else one}
        call = partial(weft.AllToAll, group, **sizes)
        refused(GeometryMismatch, call, name, str(one), str(other))
    words = "stats is 1048577; it must be an integer in 0.."
    refused(InvalidArgument, lambda: weft.AllToAll(group, stats=1048577, **SIZES), words)


@on_ranks(2, "cpu")
def test_a_rank_that_cannot_compile_stops_all(group):
    defines = ("weft=,",) if group.rank == 1 else ()
    with pytest.raises(errors.CreationFailed, match="rank 1(.|\n)*CompileError") as caught:
        weft.AllToAll(group, **SIZES, _defines=defines)
    assert len(set(group.all_gather(str(caught.value)))) == 1


@on_ranks(2, "cpu", "cuda")
def test_invalid_input_is_reported_by_the_device(group):
    d, rank = group.device, f"rank {group.rank}"
    case = Round(tokens=(8, 8), top_k=2, experts=4, hidden=16)
    with weft.AllToAll(group, **SIZES) as a2a:
        for wide, bad in ((False, 4), (False, -2), (True, 2**32), (True, -(2**63)), (True, 2**31)):
            x, ids, weights, _ = case.inputs_of(group.rank, d)
            ids = ids.long() if wide else ids
            ids[3, 1] = bad
            a2a.dispatch(x, ids, weights)
            a2a.combine()
            synchronize(d)
            refused(BadExpertId, a2a.check, rank, f"topk_ids[3, 1] is {bad}", "0..3")
            a2a.check()
        for count in (9, -1):
            n = torch.tensor([count], dtype=torch.int32, device=d)
            received = a2a.dispatch(*case.inputs_of(group.rank, d)[:3], num_tokens=n)
            synchronize(d)
            group.barrier()
            assert received.counts.tolist() == [8 if count == 9 else 0] * 2
            a2a.combine()
            synchronize(d)
            refused(TokenOverflow, a2a.check, f"is {count}", "0..8")
        play(a2a, case.next(seed=5))
        a2a.check()


EXPERTS, TOP_K, HIDDEN, TOKENS = 10, 4, 128, 24
EXTREMES = (
    *(-(2**63), -(2**63) + 1, -(2**32), -(2**31) - 1, -(2**31), -(2**16), -2, -1),
    *(EXPERTS, EXPERTS + 1, 2**16, 2**24, 2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**63 - 1),
)


@dataclass(frozen=True)
class Wild(Round):
    """A round of which a third of the ids are extreme values, and some are repeated in a row."""

    def _ids(self, rank: int, generator: torch.Generator) -> torch.Tensor:
        device, generator = generator.device, torch.Generator().manual_seed(self.seed * 64 + rank)
        size = (self.tokens[rank], self.top_k)
        ids = torch.randint(0, self.experts, size, generator=generator)
        limits = torch.iinfo(self.ids_dtype)
        extremes = torch.tensor([e for e in EXTREMES if limits.min <= e <= limits.max])
        pick = torch.randint(0, len(extremes), size, generator=generator)
        wild = torch.rand(size, generator=generator) < 0.3
        return torch.where(wild, extremes[pick], ids).to(device)


CASE = Wild((TOKENS,) * 2, TOP_K, EXPERTS, HIDDEN, ids_dtype=torch.int64)


@on_ranks(2, "cpu", "cuda")
def test_thousands_of_id_vectors_stay_in_their_slots(group):
    """Everything outside the slots of routed tokens is unchanged."""
    with CASE.open(group, TOKENS) as a2a:
        layout = a2a.config.offsets
        after = layout.planes[0] + a2a.latest_received.x.nbytes
        rest = a2a.heap.tensor((layout.outbox - after,), torch.uint8, offset=after)
        rest.fill_(MARK)
        for seed in range(10_000 // TOKENS + 1):
            play(a2a, CASE.next(seed=seed))
            synchronize(group.device)
            with pytest.raises(BadExpertId):
                a2a.check()
        assert bool((rest == MARK).all())


MODES = [Mode(quantize=None), Mode(quantize=None, reduce="sender", more={"split_phase": True})]


@pytest.mark.parametrize("mode", MODES, ids=["receiver", "sender"])
@on_ranks(2)
def test_wild_ids_of_low_latency_change_nothing_else(group, mode):
    with mode.make(group, CASE, TOKENS) as a2a:
        for seed in range(24):
            dtype = (torch.int64, torch.int32)[seed % 2]
            low.play(a2a, mode, CASE.next(seed=seed, ids_dtype=dtype), checks=False)
            with pytest.raises(BadExpertId):
                a2a.check()
            group.barrier()


@on_ranks(2)
def test_reports_of_repeated_ids_are_true(group):
    """Both are delivered by the one operator, and the first by the other."""
    d = group.device
    ids = torch.tensor([[5, 9, 5, 2]], dtype=torch.int32, device=d)
    x, weights = torch.ones((1, HIDDEN), device=d).bfloat16(), torch.ones(ids.shape, device=d)
    repeated = rf"rank {group.rank}: topk_ids\[0, 2\] repeats expert 5 of the same row.*"
    sizes = CASE.sizes(4)
    with weft.AllToAll(group, **sizes) as a2a:
        received = a2a.dispatch(x, ids)
        synchronize(d)
        local = [e in a2a.local_experts for e in ids[0].tolist()]
        assert [i >= 0 for i in received.ids[group.rank, 0].tolist()] == local
        a2a.combine()
        synchronize(d)
        with pytest.raises(BadExpertId, match=repeated + "Both were delivered"):
            a2a.check()
    with weft.LowLatencyAllToAll(group, **sizes, quantize=None) as op:
        got = op.dispatch(x, ids, weights)
        synchronize(d)
        counts = dict(zip(op.local_experts, got.counts.tolist(), strict=True))
        assert all(counts.get(e, group.size) == group.size for e in (5, 9, 2))  # once a rank
        out = op.combine(torch.ones_like(got.x), ids, weights, got.handle)
        synchronize(d)
        assert out[0].tolist() == [3.0] * HIDDEN
        text = "It was dropped; its first occurrence in the row was sent"
        with pytest.raises(BadExpertId, match=repeated + text):
            op.check()
