# SPDX-License-Identifier: Apache-2.0
"""Invalid expert ids in every call that takes ids: dropped and reported, with no stray write."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.kinds import ANY, CPU, CUDA, on_ranks
from tests.rounds import bits, synchronize
from weft.errors import BadExpertId, TokenOverflow
from weft.lowlatency import reference as meaning
from weft.moe import Expert, ExpertWeights, Routing, route

EXPERTS, TOP_K, HIDDEN, TOKENS = 10, 4, 128, 24
EXTREMES = (
    *(-(2**63), -(2**63) + 1, -(2**32), -(2**31) - 1, -(2**31), -(2**16), -2, -1),
    *(EXPERTS, EXPERTS + 1, 2**16, 2**24, 2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**63 - 1),
)
MARK = 0xA5  # in memory that no kernel may write


def extreme_ids(seed: int, *, wide: bool) -> torch.Tensor:
    """Return ids of which a third are extreme values; int64, or int32 as far as it holds them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, EXPERTS, (TOKENS, TOP_K), generator=generator)
    limits = torch.iinfo(torch.int64 if wide else torch.int32)
    extremes = torch.tensor([e for e in EXTREMES if limits.min <= e <= limits.max])
    pick = torch.randint(0, len(extremes), ids.shape, generator=generator)
    ids = torch.where(torch.rand(ids.shape, generator=generator) < 0.3, extremes[pick], ids)
    return ids if wide else ids.int()


def tokens(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((TOKENS, HIDDEN), generator=generator).bfloat16()


def rank_major(group: weft.Group, vectors: int) -> int:
    """Check that everything outside the slots of routed tokens is unchanged."""
    sizes = {"max_tokens": TOKENS, "hidden": HIDDEN, "top_k": TOP_K, "num_experts": EXPERTS}
    done = 0
    with weft.AllToAll(group, **sizes) as a2a:
        layout = a2a.config.offsets
        places = (layout.outbox - layout.planes[0],)
        inbox = a2a.heap.tensor(places, torch.uint8, offset=layout.planes[0])
        while done < vectors:
            ids = extreme_ids(17 + 1000 * done + group.rank, wide=True).to(group.device)
            x = tokens(done + group.rank).to(group.device)
            inbox.fill_(MARK)
            a2a.output().view(torch.uint8).fill_(MARK)
            synchronize(group.device)
            group.barrier()
            received = a2a.dispatch(x, ids)
            carried = (received.ids >= 0).any(dim=2)
            assert bool(((received.ids >= -1) & (received.ids < a2a.num_local_experts)).all())
            rows = received.x.view(torch.uint8).view(group.size, TOKENS, -1)
            assert bool((rows[~carried] == MARK).all())
            assert bool((inbox[received.x.nbytes :] == MARK).all())
            assert bool((a2a.output().view(torch.uint8) == MARK).all())
            a2a.output().copy_(weft.reference.identity_experts(received, torch.bfloat16))
            out = a2a.combine()
            expected = weft.reference.identity_round_trip(
                x, ids, None, a2a.placement, ranks=group.size
            )
            assert torch.equal(bits(out), bits(expected))
            synchronize(group.device)
            with pytest.raises(BadExpertId):
                a2a.check()
            done += TOKENS
            group.barrier()
    return done


@pytest.mark.parametrize("kind", [CPU, CUDA])
def test_thousands_of_id_vectors_stay_in_their_slots(ranks, kind):
    assert min(ranks(2, kind)(rank_major, 10_000)) >= 10_000


def low_latency(group: weft.Group, rounds: int, options: dict[str, object]) -> None:
    sizes = {"max_tokens": TOKENS, "hidden": HIDDEN, "top_k": TOP_K, "num_experts": EXPERTS}
    with weft.LowLatencyAllToAll(group, **sizes, quantize=None, **options) as a2a:  # type: ignore[arg-type]
        for number in range(rounds):
            wide = number % 2 == 0
            seeds = [1000 * number + rank for rank in range(group.size)]
            ids = extreme_ids(seeds[group.rank], wide=wide).to(group.device)
            x = tokens(seeds[group.rank]).to(group.device)
            slot = a2a.result_buffers[number % len(a2a.result_buffers)]
            slot.x.view(torch.uint8).fill_(MARK)
            synchronize(group.device)
            group.barrier()
            weights = torch.ones(ids.shape, device=group.device)
            got = a2a.dispatch(x, ids, weights)
            synchronize(group.device)
            want = meaning.dispatch(
                [tokens(seed) for seed in seeds],
                [extreme_ids(seed, wide=wide) for seed in seeds],
                a2a.placement,
                rank=group.rank,
                max_tokens=TOKENS,
                quantize=None,
            )
            assert torch.equal(got.counts.cpu(), want.counts)
            assert torch.equal(got.ranges.cpu(), want.ranges)
            for expert, count in enumerate(want.counts.tolist()):
                rows = got.x[expert].cpu()
                assert torch.equal(bits(rows[:count]), bits(want.x[expert, :count]))
                assert bool((rows[count:].view(torch.uint8) == MARK).all())
                assert torch.equal(got.source[expert, :count].cpu(), want.source[expert, :count])
            out = a2a.combine(torch.ones_like(got.x), ids, weights, got.handle)
            synchronize(group.device)
            served = (meaning.mask_invalid_ids(ids.cpu(), EXPERTS) >= 0).sum(dim=1)
            assert torch.equal(out.cpu().float(), served[:, None].expand(-1, HIDDEN).float())
            with pytest.raises(BadExpertId):
                a2a.check()
            group.barrier()


@pytest.mark.parametrize("options", [{"reduce": "receiver"}, {"split_phase": True}], ids=str)
@pytest.mark.parametrize("kind", ANY)
def test_wild_ids_of_low_latency_change_nothing_else(ranks, kind, options):
    ranks(2, kind)(low_latency, 24, options)


def repeats(group: weft.Group) -> tuple[str, str]:
    """Compare how each operator handles and reports an id that is repeated in a row."""
    x, d = tokens(group.rank)[:1].to(group.device), group.device
    ids = torch.tensor([[5, 9, 5, 2]], dtype=torch.int32, device=d)
    sizes = {"max_tokens": 4, "top_k": TOP_K, "num_experts": EXPERTS, "hidden": HIDDEN}
    reported = []
    with weft.AllToAll(group, **sizes) as a2a:
        received = a2a.dispatch(x, ids)
        synchronize(group.device)
        own = received.ids[group.rank, 0].tolist()
        local = [e in a2a.local_experts for e in ids[0].tolist()]
        assert [i >= 0 for i in own] == local  # both as they stand
        a2a.combine()
        synchronize(group.device)
        with pytest.raises(BadExpertId) as caught:
            a2a.check()
        reported.append(str(caught.value))
    with weft.LowLatencyAllToAll(group, **sizes, quantize=None) as low:
        weights = torch.ones(ids.shape, device=d)
        got = low.dispatch(x, ids, weights)
        synchronize(group.device)
        counts = dict(zip(low.local_experts, got.counts.tolist(), strict=True))
        assert all(counts.get(e, group.size) == group.size for e in (5, 9, 2))  # once a rank
        out = low.combine(torch.ones_like(got.x), ids, weights, got.handle)
        synchronize(group.device)
        assert out[0].tolist() == [3.0] * HIDDEN
        with pytest.raises(BadExpertId) as caught:
            low.check()
        reported.append(str(caught.value))
    return reported[0], reported[1]


@pytest.mark.parametrize("kind", ANY)
def test_reports_of_repeated_ids_are_true(ranks, kind):
    for rank, (plain, low) in enumerate(ranks(2, kind)(repeats)):
        for text in (plain, low):
            assert f"rank {rank}: topk_ids[0, 2] repeats expert 5 of the same row" in text
        assert "Both were delivered" in plain
        assert "It was dropped; its first occurrence in the row was sent" in low


@pytest.mark.parametrize("mode", ["throughput", "low_latency"])
@on_ranks(2)
def test_wild_counts_of_layers_change_nothing_else(group, mode):
    """Invalid counts on the device are clamped; ids of a router are always valid."""
    config = weft.MoEConfig(HIDDEN, 64, Routing(EXPERTS, TOP_K))
    device = group.device

    def stack_local(local: tuple[int, ...]) -> ExpertWeights:
        return ExpertWeights.stack(config, [Expert.seeded(config, e) for e in local], device)

    x = tokens(group.rank).to(device)
    logits = torch.randn((TOKENS, EXPERTS), generator=torch.Generator().manual_seed(5)).to(device)
    options = {"mode": mode, "overlap": "none", "gemm": "torch"}
    with weft.MoE(group, config, stack_local, max_tokens=TOKENS, **options) as layer:  # type: ignore[arg-type]
        before = layer(x, logits)
        for count, rows in ((-(2**31), 0), (-1, 0), (TOKENS + 1, TOKENS), (2**31 - 1, TOKENS)):
            number = torch.tensor([count], dtype=torch.int32, device=device)
            out = layer(x, logits, num_tokens=number)
            synchronize(group.device)
            assert torch.equal(bits(out[:rows]), bits(before[:rows]))
            assert not out[rows:].any()
            if mode == "throughput":
                with pytest.raises(TokenOverflow, match=f"num_tokens on the device is {count}; "):
                    layer.check()
        odd = logits.clone()
        odd[0], odd[1], odd[2] = float("nan"), float("inf"), -float("inf")
        ids, _ = route(config.routing, odd)
        assert bool(((ids >= 0) & (ids < EXPERTS)).all())
        layer(x, odd)
        synchronize(group.device)
        layer.check()
        assert torch.equal(bits(layer(x, logits)), bits(before))
        group.barrier()
