# SPDX-License-Identifier: Apache-2.0
"""deep_ep's normal mode, compared with plain torch: rows, ids, weights, counts and sums."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch

import weft
from tests.compat.buffers import KINDS, buffered
from tests.compat.test_low_latency import whole
from tests.rounds import bits, synchronize
from weft.compat import checks, row_exchange
from weft.compat.deep_ep import Buffer, Config
from weft.compat.normal_mode import NormalHandle
from weft.compat.row_exchange import RowExchange, RowFetch
from weft.errors import (
    BadExpertId,
    CreationFailed,
    GeometryMismatch,
    InvalidArgument,
    OutOfOrder,
    PeerLeft,
    TokenOverflow,
)

HIDDEN, TOP_K, EXPERTS = 256, 3, 12
TOKENS = (5, 9, 2)


class Batch(NamedTuple):
    """The rows, ids with holes and weights of one rank."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    def fp8(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return numbers, and scales that are column-major as for DeepGEMM.

        The CPU computes them: a GPU rounds a division by a constant otherwise.
        """
        blocks = self.x.cpu().float().unflatten(-1, (-1, 128))
        scales = blocks.abs().amax(dim=-1).clamp(min=1e-4) / 448
        numbers = (blocks / scales[..., None]).to(torch.float8_e4m3fn).flatten(-2)
        device = self.x.device
        return numbers.to(device), scales.to(device).T.contiguous().T


def batch(rank: int, tokens: tuple[int, ...] = TOKENS, seed: int = 0) -> Batch:
    draw: dict[str, Any] = {
        "generator": torch.Generator("cpu").manual_seed(seed * 64 + rank),
        **{"dtype": torch.float32, "device": "cpu"},
    }
    count = tokens[rank]
    x = torch.randn((count, HIDDEN), **draw).bfloat16()
    ids = torch.rand((count, EXPERTS), **draw).topk(TOP_K, dim=1).indices
    ids[torch.rand(ids.shape, **draw) < 0.3] = -1
    return Batch(x, ids, torch.rand((count, TOP_K), **draw))


def goes_to(ids: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    local = EXPERTS // ranks
    return ((ids >= rank * local) & (ids < (rank + 1) * local)).any(dim=1)


class Expected(NamedTuple):
    """The rows that a rank receives."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    counts: list[int]
    tokens: torch.Tensor  # each row's, at its source


def expected(batches: list[Batch], rank: int) -> Expected:
    ranks, local = len(batches), EXPERTS // len(batches)
    arrives = [goes_to(b.ids, rank, ranks) for b in batches]
    ids = torch.cat([b.ids[h] for b, h in zip(batches, arrives, strict=True)])
    weights = torch.cat([b.weights[h] for b, h in zip(batches, arrives, strict=True)])
    own = torch.where((ids >= rank * local) & (ids < (rank + 1) * local), ids - rank * local, -1)
    return Expected(
        torch.cat([b.x[h] for b, h in zip(batches, arrives, strict=True)]),
        own,
        torch.where(own >= 0, weights, torch.zeros_like(weights)),
        [int((own == expert).sum()) for expert in range(local)],
        torch.cat([h.nonzero()[:, 0] for h in arrives]).int(),
    )


def summed(mine: Batch, ranks: int) -> torch.Tensor:
    """Return the sum of copies in fp32, where every rank returns the rows unchanged."""
    copies = sum(goes_to(mine.ids, rank, ranks).float() for rank in range(ranks))
    assert isinstance(copies, torch.Tensor)
    return (mine.x.float() * copies[:, None] + 0.0).bfloat16()  # sums begin with 0: none is -0


def on(group: weft.Group, given: Batch) -> Batch:
    return Batch(*(t.to(group.device) for t in given))


def layout(buffer: Buffer, given: Batch) -> dict[str, Any]:
    """Return the layout as arguments of dispatch."""
    per_rank, nothing, per_expert, in_rank, _ = buffer.get_dispatch_layout(given.ids, EXPERTS)
    assert nothing is None
    return {
        **{"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank},
        "num_tokens_per_expert": per_expert,
    }


def sent(buffer: Buffer, given: Batch) -> tuple[torch.Tensor, NormalHandle]:
    """Dispatch in bfloat16; return the received rows and the handle."""
    x, _, _, _, handle, _ = buffer.dispatch(given.x, **layout(buffer, given))
    assert handle is not None
    return whole(x), handle


def made(buffer: Buffer, kind: type[RowExchange]) -> list[Any]:
    """Return the exchanges of one kind that a buffer holds."""
    return [each for each in buffer._normal.exchanges.values() if isinstance(each, kind)]


def same(got: torch.Tensor | None, want: torch.Tensor) -> None:
    assert got is not None
    assert got.dtype == want.dtype
    assert torch.equal(bits(got.cpu()), bits(want))


def own_test(group: weft.Group, tokens: tuple[int, ...]) -> None:
    """Make the calls of deep_ep's own test, in its order, with every form of the arguments.

    A dispatch, one with a bound of rows, one with the handle, a combine. Ids are int32 in some.
    """
    buffer = Buffer(group, int(2e9), 0, num_qps_per_rank=1, explicitly_destroy=True)
    config, batches = Config(24, 8, 256), [batch(r, tokens) for r in range(group.size)]
    assert buffer.is_sm90_compiled()
    forms = ((0, 1, 0, 1), (1, 0, 1, 1), (1, 1, 0, 0), (0, 0, 1, 0))
    for previous, finishes, fp8, with_topk in (map(bool, form) for form in forms):
        own, want = on(group, batches[group.rank]), expected(batches, group.rank)
        if previous:
            own, want = own._replace(ids=own.ids.int()), want._replace(ids=want.ids.int())
        again: dict[str, Any] = {"config": config, "async_finish": finishes}
        if previous:
            again["previous_event"] = buffer.capture()
        args = {**again, **layout(buffer, own)}
        if with_topk:
            args |= {"topk_idx": own.ids, "topk_weights": own.weights}
        inputs = own.fp8() if fp8 else own.x
        got, ids, weights, counts, handle, event = buffer.dispatch(inputs, **args)
        assert handle is not None
        event.current_stream_wait()
        assert counts == want.counts
        x = check_x(got, want, fp8)
        prefix = handle[0]
        assert prefix is not None
        sizes = [int(goes_to(b.ids, group.rank, group.size).sum()) for b in batches]
        assert prefix[:, group.rank].tolist() == list(itertools.accumulate(sizes))
        same(handle[3], want.tokens)
        if with_topk:
            same(ids, want.ids)
            same(weights, want.weights)
            bound = max(*tokens, 1) * group.size
            got, ids, received, counts, most, _ = buffer.dispatch(
                inputs, **args, num_worst_tokens=bound
            )
            assert most is not None
            assert ids is not None
            assert received is not None
            assert counts == []
            assert most[3] is not None
            assert len(ids) == len(received) == len(most[3]) == bound
            rows = len(want.x)
            check_x(tuple(t[:rows] for t in got) if fp8 else whole(got)[:rows], want, fp8)
            same(ids[:rows], want.ids)
            same(received[:rows], want.weights)
            assert bool((ids[rows:] == -1).all())
            assert not bool(received[rows:].any())
        else:
            assert ids is None
            assert weights is None
            got, *nothing, _ = buffer.dispatch(inputs, handle=handle, **again)
            assert nothing == [None] * 4
            check_x(got, want, fp8)
        out, sums, event = buffer.combine(x, handle, weights, **again)
        event.current_stream_wait()
        assert event.event is None or finishes
        if not fp8:
            same(out, summed(batches[group.rank], group.size))
        if with_topk:
            same(sums, torch.where(own.ids >= 0, own.weights, 0.0).cpu())
        else:
            assert sums is None
    buffer.check()
    buffer.destroy()
    buffer.destroy()


def check_x(got: Any, want: Expected, fp8: bool) -> torch.Tensor:
    """Check received rows, and return them in bfloat16."""
    if not fp8:
        same(got, want.x)
        return whole(got)
    numbers, scales = got
    sent, its_scales = Batch(want.x, want.ids, want.weights).fp8()
    same(numbers, sent)
    same(scales, its_scales.contiguous())
    widened = numbers.float().unflatten(-1, (-1, 128)) * scales[..., None]
    return whole(widened.flatten(-2).bfloat16())


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [
        *((kind, tokens) for kind in KINDS[:1] for tokens in (TOKENS, (0, 4, 0), (5,))),
        *(
            pytest.param("cuda", tokens, marks=pytest.mark.gpu)
            for tokens in (TOKENS, (0, 4, 0), (5,))
        ),
        ("cpu", TOKENS),
    ],
)
def test_deep_eps_own_test(ranks, kind, tokens):
    ranks(len(tokens), kind)(own_test, tokens)


@buffered()
def biased(group: weft.Group, buffer: Buffer) -> None:
    batches = [batch(r) for r in range(group.size)]
    own = on(group, batches[group.rank])
    x, handle = sent(buffer, own)
    plain = buffer.combine(x, handle)[0].float()
    one, two = own.x * 3, -own.x / 2
    same(buffer.combine(x, handle, bias=one)[0], (plain + one.float()).bfloat16().cpu())
    both = (plain + one.float()).bfloat16().float() + two.float()
    same(buffer.combine(x, handle, bias=(one, two))[0], both.bfloat16().cpu())


@buffered()
def growing(group: weft.Group, buffer: Buffer) -> list[int]:
    """Dispatch more tokens than before, on one rank only; older handles stay valid."""
    result: list[int] = []
    first: tuple[Any, ...] = ()
    for tokens in ((3, 5), (3, 130), (300, 0), (1, 1)):
        batches = [batch(r, tokens) for r in range(group.size)]
        own, want = on(group, batches[group.rank]), expected(batches, group.rank)
        x, _, _, counts, handle, _ = buffer.dispatch(own.x, **layout(buffer, own))
        assert handle is not None
        same(whole(x), want.x)
        assert counts == want.counts
        same(buffer.combine(whole(x), handle)[0], summed(batches[group.rank], group.size))
        first = first or (whole(x), handle, batches[group.rank])
        (fetch,) = made(buffer, RowFetch)
        result.append(fetch.max_tokens)
    x, handle, own = first
    same(buffer.combine(x, handle)[0], summed(own, group.size))
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_memory_grows_on_all_ranks_together(ranks, kind):
    assert ranks(2, kind)(growing) == [[64, 256, 512, 512]] * 2


@buffered()
def wrong_on_one_rank(group: weft.Group, buffer: Buffer) -> None:
    """An invalid argument on one rank raises on every rank before rows are sent."""
    ranks = group.size
    batches = [batch(r) for r in range(ranks)]
    own = on(group, batches[group.rank])
    args = {**layout(buffer, own), "topk_idx": own.ids, "topk_weights": own.weights}
    last = group.rank == ranks - 1
    for value in (EXPERTS, -2, 1 << 40):
        ids = own.ids.clone()
        if last:
            ids[0, 0] = value
        with pytest.raises(BadExpertId, match=r"rank 1 has 1 entries outside of -1\.\.11"):
            buffer.dispatch(own.x, **{**args, "topk_idx": ids})
    more = own.ids.repeat(1, 2 if last else 1), own.weights.repeat(1, 2 if last else 1)
    text = (
        r"rank [01] called dispatch with top_k \(0: no topk_idx\) [36], but this rank, [01], with"
    )
    with pytest.raises(GeometryMismatch, match=text):
        buffer.dispatch(own.x, **{**args, "topk_idx": more[0], "topk_weights": more[1]})
    rows, scales = own.fp8()
    scales = scales.view(torch.int32) if last else scales
    text = r"called dispatch with integer scales \(1: yes\) [01], but this rank, [01], with"
    with pytest.raises(GeometryMismatch, match=text):
        buffer.dispatch((rows, scales), **args)
    counts = args["num_tokens_per_rank"] + last
    with pytest.raises(InvalidArgument, match="num_tokens_per_rank of rank 1 is .* pass both"):
        buffer.dispatch(own.x, **{**args, "num_tokens_per_rank": counts})
    x, handle = sent(buffer, own)
    same(x, expected(batches, group.rank).x)
    same(buffer.combine(x, handle)[0], summed(batches[group.rank], ranks))
    # If the host does not wait, such ids are dropped, and check raises the error.
    ids = own.ids.clone()
    ids[:, 0] = EXPERTS if last else -1
    bound: dict[str, Any] = {"num_worst_tokens": ranks * max(TOKENS)}
    _, got, *_ = buffer.dispatch(own.x, **{**args, "topk_idx": ids}, **bound)
    assert got is not None
    assert int(got.max()) < EXPERTS // ranks
    if last:
        with pytest.raises(BadExpertId, match=f"{len(ids)} entries of topk_idx"):
            buffer.check()


@buffered()
def rows_that_do_not_fit(group: weft.Group, buffer: Buffer) -> None:
    """With different bounds on the ranks, rows beyond a bound are dropped."""
    batches = [batch(r) for r in range(group.size)]
    every = torch.tensor([0, EXPERTS // 2, -1])  # both ranks
    batches = [b._replace(ids=every.repeat(len(b.ids), 1)) for b in batches]
    own = on(group, batches[group.rank])
    args = {**layout(buffer, own), "topk_idx": own.ids, "topk_weights": own.weights}
    bound = (10, 18)[group.rank]
    got, ids, _, _, handle, _ = buffer.dispatch(own.x, **args, num_worst_tokens=bound)
    assert ids is not None
    want = expected(batches, group.rank)
    same(whole(got)[:14], want.x[:bound])
    same(ids[:14], want.ids[:bound])
    assert handle is not None
    buffer.combine(whole(got), handle)
    synchronize(group.device)
    if group.rank == 0:
        with pytest.raises(TokenOverflow):
            buffer.check()


@buffered()
def mixed_handles(group: weft.Group, buffer: Buffer) -> None:
    """Different handles on the ranks give as many rows as expected; later calls work."""
    ranks = group.size
    few, many = ([batch(r, (n,) * ranks, n) for r in range(ranks)] for n in (2, 40))
    handles = []
    for batches in (few, many):
        own = on(group, batches[group.rank])
        handles.append((*sent(buffer, own), own))
    x, handle, own = handles[min(group.rank, 1)]
    got, *_ = buffer.dispatch(own.x, handle=handle)
    assert whole(got).shape == x.shape
    assert buffer.combine(x, handle)[0].shape == own.x.shape
    x, handle, own = handles[1]
    same(whole(buffer.dispatch(own.x, handle=handle)[0]), expected(many, group.rank).x)
    same(buffer.combine(x, handle)[0], summed(many[group.rank], ranks))


def destroy_mid_round(group: weft.Group) -> str:
    """A rank destroys its buffer while the other dispatches: it raises before the deadline."""
    buffer, own = Buffer(group, timeout=600.0, first_timeout=600.0), on(group, batch(group.rank))
    args = layout(buffer, own)
    buffer.combine(*sent(buffer, own))
    group.barrier()
    if group.rank == 1:
        buffer.destroy()
        return ""
    with pytest.raises(PeerLeft) as raised:
        buffer.dispatch(own.x, **args)
    with pytest.raises(PeerLeft):
        buffer.check()
    return str(raised.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_left_is_named(ranks, kind):
    text, _ = ranks(2, kind)(destroy_mid_round)
    assert "rank 1" in text
    assert "closed its all-to-all" in text


def refused(group: weft.Group) -> None:
    with pytest.raises(InvalidArgument, match="num_rdma_bytes is 8; it must be 0: .* one host"):
        Buffer(group, 8, 8)
    with pytest.raises(InvalidArgument, match="enable_shrink is True"):
        Buffer(group, enable_shrink=True)
    buffer, other, own = Buffer(group), Buffer(group), on(group, batch(group.rank))
    args = layout(buffer, own)
    topk: dict[str, Any] = {"topk_idx": own.ids, "topk_weights": own.weights}
    x, handle = sent(buffer, own)
    numbers, scales = own.fp8()
    bad: tuple[tuple[dict[str, Any], str], ...] = (
        ({"x": own.x[:, :4].contiguous()}, "x has rows of 8 bytes"),
        ({"x": (own.x, scales)}, r"x\[0\] has dtype torch.bfloat16"),
        ({"x": (numbers, scales[1:])}, r"x\[1\] has shape"),
        ({"num_tokens_per_rank": None}, "num_tokens_per_rank is None; .* or pass a handle"),
        ({"topk_idx": own.ids}, "topk_idx without topk_weights"),
        ({"topk_weights": own.weights}, "topk_weights without topk_idx"),
        ({"num_worst_tokens": 100}, "num_worst_tokens is 100 without topk_idx"),
        ({**topk, "handle": handle}, "topk_idx is a tensor .* a dispatch with a handle sends rows"),
        ({"x": own.x[1:], "handle": handle}, "x has 4 tokens, but the handle's dispatch had 5"),
    )
    for change, text in bad:
        with pytest.raises(InvalidArgument, match=text):
            buffer.dispatch(**{"x": own.x, **args, **change})
    with pytest.raises(TokenOverflow, match="num_worst_tokens is 4, but this rank, one of 1, has"):
        buffer.dispatch(own.x, **args, **topk, num_worst_tokens=4)
    with pytest.raises(InvalidArgument, match=r"bias\[1\] has dtype"):
        buffer.combine(x, handle, bias=(own.x, own.x.float()))
    for call in (lambda: other.combine(x, handle), lambda: other.dispatch(own.x, handle)):
        with pytest.raises(OutOfOrder, match="belongs to another buffer"):
            call()
    with pytest.raises(InvalidArgument, match="low_latency_mode is False; it must be True"):
        buffer.low_latency_dispatch(own.x, own.ids, 8, EXPERTS)
    for each in (buffer, other):
        each.destroy()
    late: tuple[Any, ...] = (
        lambda: buffer.combine(x, handle),
        lambda: buffer.dispatch(own.x, handle),
        lambda: buffer.get_dispatch_layout(own.ids, EXPERTS),
    )
    for call in late:
        with pytest.raises(OutOfOrder, match="destroyed"):
            call()


def test_invalid_arguments_are_refused(ranks):
    ranks(1, "threads")(refused)


def test_sizes_and_configs_are_what_callers_compute_with():
    for ranks in (1, 2, 8, 32):
        for config in (Buffer.get_dispatch_config(ranks), Buffer.get_combine_config(ranks)):
            assert config.num_sms == Buffer.num_sms
            assert config.get_rdma_buffer_size_hint(14336, ranks) == 0
    few, many = (Config(sms).get_nvl_buffer_size_hint(14336, 8) for sms in (2, 20))
    assert 9 * 256 * 14336 < few < many < 10.2 * few
    with pytest.raises(InvalidArgument):
        Config().get_nvl_buffer_size_hint(100, 8)


def sglangs(group: weft.Group) -> None:
    """Make the calls of SGLang 0.5.17's dispatcher, in both modes of one buffer.

    Counts are rounded to DeepGEMM's alignment.
    """
    sizes = [0, 0]
    for config in (Buffer.get_dispatch_config(group.size), Buffer.get_combine_config(group.size)):
        hints = (config.get_nvl_buffer_size_hint, config.get_rdma_buffer_size_hint)
        sizes = [max(n, hint(HIDDEN * 2, group.size)) for n, hint in zip(sizes, hints, strict=True)]
    hint = Buffer.get_low_latency_rdma_size_hint(16, HIDDEN, group.size, EXPERTS)
    buffer = Buffer(
        group,
        sizes[0],
        max(sizes[1], hint),
        low_latency_mode=True,
        num_qps_per_rank=max(Buffer.num_sms, EXPERTS // group.size),
        allow_mnnvl=False,
    )
    batches = [batch(r) for r in range(group.size)]
    own, want = on(group, batches[group.rank]), expected(batches, group.rank)
    for finishes in (False, True, False):
        flags: dict[str, Any] = {"async_finish": finishes}
        flags["previous_event"] = previous = buffer.capture() if finishes else None
        flags["allocate_on_comm_stream"] = previous is not None
        per_rank, per_rdma_rank, per_expert, in_rank, previous = buffer.get_dispatch_layout(
            own.ids, EXPERTS, **flags
        )
        flags["previous_event"] = previous
        flags["allocate_on_comm_stream"] = previous is not None and finishes
        got, ids, weights, counts, handle, event = buffer.dispatch(
            own.fp8(),
            topk_idx=own.ids,
            topk_weights=own.weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            expert_alignment=128,
            config=None,
            **flags,
        )
        event.current_stream_wait()
        assert handle is not None
        assert counts == [-(-n // 128) * 128 for n in want.counts]
        same(ids, want.ids)
        same(weights, want.weights)
        check_x(got, want, True)
        flags["previous_event"] = buffer.capture() if finishes else None
        flags["allocate_on_comm_stream"] = finishes
        x = want.x.to(group.device)
        out, nothing, event = buffer.combine(x, handle, config=None, **flags)
        event.current_stream_wait()
        assert nothing is None
        same(out, summed(batches[group.rank], group.size))
        buffer.clean_low_latency_buffer(16, HIDDEN, EXPERTS)
        rows, _, low, _, _ = buffer.low_latency_dispatch(own.x, own.ids, 16, EXPERTS, use_fp8=False)
        out = buffer.low_latency_combine(whole(rows), own.ids, own.weights, low)[0]
        kept = torch.where(own.ids >= 0, own.weights, 0.0).sum(dim=1, keepdim=True)
        assert torch.allclose(out.float(), own.x.float() * kept, rtol=2e-2, atol=2e-2)
    buffer.check()
    buffer.destroy()


@buffered()
def none_made(group: weft.Group, buffer: Buffer) -> None:
    own = on(group, batch(group.rank))
    text = f"a dispatch to {EXPERTS} experts is new in a graph capture"
    with pytest.raises(InvalidArgument, match=text):
        buffer.dispatch(own.x, **layout(buffer, own))


def test_a_capture_makes_no_exchange(ranks, monkeypatch):
    monkeypatch.setattr(checks, "is_capturing", lambda device: True)
    ranks(2, "threads")(none_made)


@buffered()
def not_everywhere(group: weft.Group, buffer: Buffer) -> None:
    """If one rank cannot load a kernel, no rank keeps the exchange; a retry works."""
    batches = [batch(r) for r in range(group.size)]
    own = on(group, batches[group.rank])
    with pytest.MonkeyPatch.context() as patch:
        if group.rank:
            patch.setattr(row_exchange, "load_kernel", None)
        with pytest.raises(CreationFailed, match="a row exchange failed on rank 1 of 2"):
            buffer.dispatch(own.x, **layout(buffer, own))
        assert not made(buffer, RowFetch)
    same(buffer.combine(*sent(buffer, own))[0], summed(batches[group.rank], group.size))


def test_a_kernel_that_one_rank_cannot_load(ranks):
    ranks(2, "cpu")(not_everywhere)


@buffered()
def in_turns(group: weft.Group, buffer: Buffer) -> None:
    """Use streams that wait only for the passed events, as callers of deep_ep may."""
    ranks = group.size
    batches = [batch(r, (300, 200)) for r in range(ranks)]
    own, want = on(group, batches[group.rank]), expected(batches, group.rank)
    args = layout(buffer, own)
    torch.cuda.synchronize()
    streams: list[Any] = [torch.cuda.Stream() for _ in range(2)]
    kept = []
    for turn in range(6):
        with torch.cuda.stream(streams[turn % 2]):
            x, _, _, _, handle, event = buffer.dispatch(own.x, **args, async_finish=True)
        with torch.cuda.stream(streams[(turn + turn // 2) % 2]):
            assert handle is not None
            out, _, _ = buffer.combine(whole(x), handle, previous_event=event)
        kept.append((x, out))
    torch.cuda.synchronize()
    for x, out in kept:
        same(whole(x), want.x)
        same(out, summed(batches[group.rank], ranks))


@buffered()
def captured(group: weft.Group, buffer: Buffer) -> None:
    """Capture dispatch and combine with a bound of rows in a graph each."""
    ranks = group.size
    batches = [[batch(r, TOKENS, seed) for r in range(ranks)] for seed in (0, 1, 2)]
    own = on(group, batches[0][group.rank])
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]

    def dispatch() -> Any:
        args = {**layout(buffer, own), "topk_idx": own.ids, "topk_weights": own.weights}
        return buffer.dispatch(own.x, **args, num_worst_tokens=ranks * max(TOKENS))

    warm = dispatch()
    buffer.combine(warm[0], warm[4])
    torch.cuda.synchronize()
    with torch.cuda.graph(graphs[0]):
        x, ids, weights, counts, handle, _ = dispatch()
    with torch.cuda.graph(graphs[1]):
        out, _, _ = buffer.combine(x, handle)
    assert counts == []
    for drawn in batches:
        for place, value in zip(own, drawn[group.rank], strict=True):
            place.copy_(value)
        graphs[0].replay()
        want = expected(drawn, group.rank)
        same(x[: len(want.x)], want.x)
        same(ids[: len(want.x)], want.ids)
        same(weights[: len(want.x)], want.weights)
        graphs[1].replay()
        same(out, summed(drawn[group.rank], ranks))
        same(buffer.combine(x, handle)[0], summed(drawn[group.rank], ranks))  # eager, between
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("body", [in_turns, captured])
def test_streams_and_graphs(ranks, body):
    ranks(2, "cuda")(body)


BODIES = [biased, wrong_on_one_rank, rows_that_do_not_fit, mixed_handles, sglangs]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("body", BODIES)
def test_two_ranks(ranks, kind, body):
    ranks(2, kind)(body)
