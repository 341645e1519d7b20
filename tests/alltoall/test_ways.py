# SPDX-License-Identifier: Apache-2.0
"""Ways of rows: quantised, in fewer slots, stored by experts; statistics; the order of calls."""

import pytest
import torch

import weft
from tests.compat.calls import refused
from tests.operators import capture_body
from tests.ranks import on_ranks
from tests.rounds import Round, bits, combine_options, play, synchronize
from tests.sending import make, results
from weft.errors import GeometryMismatch, InvalidArgument, OutOfOrder
from weft.grouping.operator import ExpertGroups

TOKENS, BF16 = 12, torch.bfloat16


def strange_rows(hidden: int) -> torch.Tensor:
    """Return rows whose blocks are zeros, specials, tiny, huge, and everything between."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn((16, hidden), generator=generator)
    x *= torch.logspace(-40, 36, 16)[:, None]
    x[1] = 0
    x[2, 5] = float("inf")
    x[3, hidden - 1] = float("nan")
    x[4, :128] = 2.0**-118
    x[5, :32] = -0.0
    x[6] = 448.0
    x[7] = torch.linspace(-500, 500, hidden)
    return x


# One block, several, and as many as a model has.
QUANTISED = (BF16, 7168), (BF16, 128), (torch.float16, 640), (torch.float32, 640)


@pytest.mark.parametrize("quantize", ["fp8", "mxfp8"])
@on_ranks(2)
def test_dispatch_quantises_bit_by_bit(group, quantize):
    for dtype, hidden in QUANTISED:
        case = Round(tokens=(16, 16), hidden=hidden, dtype=dtype, top_k=2, experts=6)
        with case.open(group, quantize=quantize) as a2a:
            x = strange_rows(hidden).to(dtype)
            ids = case.inputs_of(group.rank, group.device)[1]
            received = a2a.dispatch(x.to(group.device), ids)
            carries = (received.ids >= 0).any(dim=2).cpu()
            q, scales = (plane.cpu() for plane in received.payloads)
            expected_q, expected_scales = weft.reference.quantize(x, quantize)
            for source in range(group.size):
                kept = carries[source]
                assert torch.equal(bits(q[source][kept]), bits(expected_q[kept]))
                # Which NaN a NaN scale is, is not defined.
                result = scales[source][kept].float().nan_to_num(7e37)
                assert torch.equal(result, expected_scales[kept].float().nan_to_num(7e37))
            a2a.output().zero_()
            a2a.combine()
            a2a.check()


@pytest.mark.parametrize("kind", ["fp8", "mxfp8"])
def test_errors_are_bounded(kind):
    """|x - q s| <= 2^-4 |x| for normal values of a block, and half a subnormal step otherwise."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((64, 1024), generator=generator) * torch.logspace(-30, 30, 64)[:, None]
    q, scales = weft.reference.quantize(x, kind)
    back = weft.reference.dequantize(q, scales).double()
    step = scales.double().repeat_interleave(1024 // scales.shape[1], dim=1)
    error = (back - x.double()).abs()
    allowed = torch.maximum(2.0**-4 * x.double().abs(), 2.0**-10 * step)
    assert bool((error <= allowed * (1 + 1e-6)).all())


@pytest.mark.parametrize("way", ["push", "fp8"])
@on_ranks(3)
def test_counts_beyond_the_inbox_are_clamped(group, way):
    case = Round(tokens=(16, 16, 16), hidden=256, experts=18, top_k=6, options=combine_options(way))
    with case.open(group) as a2a:
        for lie in (-1, 2**31 - 1):
            received = a2a.dispatch(*case.inputs_of(group.rank, group.device)[:3])
            a2a.output().zero_()
            received.counts.fill_(lie)
            a2a.combine()
        play(a2a, case, poison=False)


@on_ranks(3, "threads")
def test_split_calls_must_alternate(group):
    case = Round(tokens=(5, 0, 16), hidden=256)
    x, ids, weights, _ = case.inputs_of(group.rank, group.device)
    with case.open(group) as a2a:
        refused(InvalidArgument, lambda: a2a.dispatch_send(x, ids, weights), "split_phase=True")
    with case.open(group, split_phase=True) as a2a:
        for call in (a2a.dispatch_recv, a2a.combine_send, a2a.combine_recv, a2a.combine):
            refused(OutOfOrder, call, "expects dispatch")
        a2a.dispatch_send(x, ids, weights)
        refused(OutOfOrder, lambda: a2a.dispatch(x, ids, weights), "expects dispatch_recv")
        a2a.dispatch_recv()
        a2a.combine_send()
        refused(OutOfOrder, a2a.combine, "expects combine_recv")
        a2a.combine_recv()


@pytest.mark.parametrize("way", ["pull", "push", "fp8", "choices"])
@on_ranks(3)
def test_grouping_rows_of_fewer_slots(group, way):
    case = Round(tokens=(5, 0, 3), hidden=128, options=combine_options(way))
    x, ids, weights, _ = case.inputs_of(group.rank, group.device)
    outs = []
    with case.open(group, TOKENS, split_phase=True) as a2a:
        groups = ExpertGroups(a2a)
        for rows in (None, 5, 6, 12):
            got = groups.gather(a2a.dispatch(x, ids, weights, rows=rows))
            assert bool((got.slot[got.slot >= 0] // a2a.max_tokens != 1).all())
            y = torch.where(got.slot[:, None] >= 0, got.x, 0).to(case.dtype)
            if way == "pull":
                groups.scatter(y)
                outs.append(a2a.combine())
            else:
                groups.send(y)
                outs.append(a2a.combine_recv())
        assert all(torch.equal(bits(outs[0]), bits(other)) for other in outs[1:])
        assert bool(outs[0].any()) == (group.rank != 1)


@pytest.mark.parametrize("rows", [(4, 5), (None, 6), (8, None)])
@on_ranks(2)
def test_ranks_with_different_numbers_of_slots_raise(group, rows):
    case, text = Round(tokens=(4, 2), hidden=128), "nothing was raised"
    with case.open(group, TOKENS) as a2a:
        try:
            a2a.dispatch(*case.inputs_of(group.rank, group.device)[:3], rows=rows[group.rank])
            a2a.combine()
            synchronize(group.device)
            a2a.check()
        except GeometryMismatch as error:
            text = str(error)
    texts = group.all_gather(text)
    assert "nothing was raised" not in texts
    both = [TOKENS if n is None else n for n in rows]
    named = [
        f"rank {1 - r} called with rows={both[1 - r]}; this rank with rows={both[r]}."
        for r in range(2)
    ]
    assert any(name in "; ".join(texts) for name in named)


@on_ranks(2)
def test_addresses_of_rows_that_experts_store(group):
    case = Round(tokens=(4, 9), hidden=256, top_k=3)
    x, ids, weights, _ = case.inputs_of(group.rank, group.device)
    zeros = torch.zeros((group.size, 16, case.hidden), dtype=case.dtype, device=group.device)
    with make(group, case, combine="gemm_push", split_phase=False) as a2a:
        refused(InvalidArgument, a2a.output, "combine='gemm_push'")
        groups = ExpertGroups(a2a)
        assert ExpertGroups.memory_bytes(a2a) == groups.buffers.bytes()
        grouped = groups.gather(a2a.dispatch(x, ids, weights))
        y = results(groups, grouped, 1, a2a.dtype)
        refused(InvalidArgument, lambda: groups.scatter(y), "scatter on an all-to-all with")
        refused(InvalidArgument, lambda: groups.send(y), "split_phase=True")
        refused(InvalidArgument, groups.sent, "split_phase=True")
        refused(InvalidArgument, lambda: a2a.combine(zeros), "stored at its token's owner")
        address = grouped.dst_addr
        assert address is not None
        synchronize(group.device)
        assert torch.equal(address != 0, grouped.slot >= 0)
        used = address[address != 0]
        assert used.unique().numel() == used.numel()
        site, rows = a2a.site, a2a.config.shape.returned_rows
        place = used - site.base - a2a.config.offsets.returned
        owner = torch.div(place, site.stride, rounding_mode="floor")
        assert torch.equal(owner, grouped.slot[address != 0].long() // a2a.max_tokens)
        within = (place - owner * site.stride) // (2 * case.hidden)
        assert bool(((within >= 0) & (within < rows)).all())
        a2a.combine()
    with make(group, case, combine="push") as a2a:
        groups = ExpertGroups(a2a)
        grouped = groups.gather(a2a.dispatch(x, ids, weights))
        assert grouped.dst_addr is None
        refused(InvalidArgument, groups.sent, "its rows have no dst_addr")
        groups.send(results(groups, grouped, 1, a2a.dtype))
        a2a.combine_recv()
    with make(group, case, combine="gemm_push") as a2a:
        groups = ExpertGroups(a2a)
        a2a.dispatch(x, ids, weights)
        refused(OutOfOrder, groups.sent, "sent without a gather")


@on_ranks(2)
def test_ids_and_weights_may_change_after_dispatch(group):
    case = Round(tokens=(16, 9), hidden=256)
    x, ids, weights, _ = case.inputs_of(group.rank, group.device)
    count = torch.tensor([3], dtype=torch.int32, device=group.device)
    outs = []
    with make(group, case, combine="gemm_push") as a2a:
        groups = ExpertGroups(a2a)
        for spoils, num_tokens in ((False, None), (True, None), (False, count)):
            own_ids, own_weights = ids.clone(), weights.clone()
            received = a2a.dispatch(x, own_ids, own_weights, num_tokens=num_tokens)
            grouped = groups.gather(received)
            if spoils:
                own_ids.fill_(-1)
                own_weights.fill_(float("nan"))
            groups.send(results(groups, grouped, 3, a2a.dtype))
            outs.append(a2a.combine_recv())
    assert torch.equal(bits(outs[0]), bits(outs[1]))
    # Fewer tokens than before count, and the rest is zero.
    assert bool(outs[2][:3].any())
    assert not bool(outs[2][3:].any())


CASE = Round(tokens=(4, 4, 0), top_k=3, experts=9, hidden=128)
SIZES = CASE.sizes(16)


@pytest.mark.parametrize("num_sms", [1, 8])
@on_ranks(2, "cuda")
def test_numbers_on_few_sms(group, num_sms):
    for count in (1, 4099):
        with CASE.open(group, stats=count, num_sms=num_sms) as a2a:
            for seed in range(9):
                tokens = tuple((5 * r + 7 * seed) % 17 for r in range(group.size))
                play(a2a, CASE.next(tokens=tokens, seed=seed), poison=False)
            a2a.check()


@on_ranks(2)
def test_numbers_of_a_replayed_graph(group):
    count, device = 70, group.device
    x, ids, *_ = CASE.next(tokens=(2, 2)).inputs_of(group.rank, device)
    own = torch.zeros(count, dtype=torch.int32, device=device)
    seen = torch.zeros((group.size, count), dtype=torch.int32, device=device)
    with weft.AllToAll(group, stats=count, **SIZES) as a2a:

        def exchange() -> None:
            received = a2a.dispatch(x, ids, stats=own)
            assert received.stats is not None
            seen.copy_(received.stats)
            a2a.combine()

        replay = capture_body(group, exchange)
        for seed in range(20):
            stats = [CASE.next(seed=seed).stats_of(r, count, device) for r in range(group.size)]
            own.copy_(stats[group.rank])
            replay()
            assert torch.equal(seen, torch.stack(stats))
        a2a.check()


def test_the_load_of_experts():
    ids = torch.tensor([[0, 2], [2, -1], [9, 2]])
    assert weft.reference.expert_load(ids, 4).tolist() == [1, 0, 3, 0]
    assert weft.reference.expert_load(ids.int()[:0], 3).tolist() == [0, 0, 0]
    assert weft.reference.expert_load(ids, 4).dtype == torch.int32
