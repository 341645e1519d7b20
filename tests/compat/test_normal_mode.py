# SPDX-License-Identifier: Apache-2.0
"""deep_ep's normal mode, compared with plain torch: rows, ids, weights, counts and sums."""

import itertools
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

import weft
from tests.compat.calls import buffered
from tests.ranks import ANY, CPU, on_ranks
from tests.rounds import bits, synchronize
from weft import errors
from weft.compat import checks, row_exchange
from weft.compat.deep_ep import Buffer, Config
from weft.compat.normal_mode import NormalHandle
from weft.compat.row_exchange import RowExchange, RowFetch
from weft.errors import BadExpertId, GeometryMismatch, InvalidArgument, OutOfOrder, TokenOverflow

HIDDEN, TOP_K, EXPERTS = 256, 3, 12
TOKENS = (5, 9, 2)


class Batch(NamedTuple):
    """The rows, ids with holes and weights of one rank."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    def fp8(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return numbers, and scales that are column-major as for DeepGEMM."""
        # On the CPU: a GPU rounds a division by a constant otherwise.
        blocks = self.x.cpu().float().unflatten(-1, (-1, 128))
        scales = blocks.abs().amax(dim=-1).clamp(min=1e-4) / 448
        numbers = (blocks / scales[..., None]).to(torch.float8_e4m3fn).flatten(-2)
        device = self.x.device
        return numbers.to(device), scales.to(device).T.contiguous().T


def batch(rank: int, tokens: tuple[int, ...] = TOKENS, seed: int = 0) -> Batch:
    draw: dict[str, Any] = {"generator": torch.Generator("cpu").manual_seed(seed * 64 + rank)}
    draw |= {"dtype": torch.float32, "device": "cpu"}  # whatever torch's defaults are
    count = tokens[rank]
    x = torch.randn((count, HIDDEN), **draw).bfloat16()
    ids = torch.rand((count, EXPERTS), **draw).topk(TOP_K, dim=1).indices
    ids[torch.rand(ids.shape, **draw) < 0.3] = -1
    return Batch(x, ids, torch.rand((count, TOP_K), **draw))


def goes_to(ids: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    local = EXPERTS // ranks
    return ((ids >= rank * local) & (ids < (rank + 1) * local)).any(dim=1)


class Expected(NamedTuple):
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    counts: list[int]
    tokens: torch.Tensor  # each row's, at its source


def expected(batches: list[Batch], rank: int) -> Expected:
    ranks, local = len(batches), EXPERTS // len(batches)
    arrives = [goes_to(b.ids, rank, ranks) for b in batches]
    parts = [[each[h] for each in b] for b, h in zip(batches, arrives, strict=True)]
    x, ids, weights = (torch.cat(each) for each in zip(*parts, strict=True))
    own = torch.where((ids >= rank * local) & (ids < (rank + 1) * local), ids - rank * local, -1)
    return Expected(
        x,
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
    per_rank, nothing, per_expert, in_rank, _ = buffer.get_dispatch_layout(given.ids, EXPERTS)
    assert nothing is None
    names = "num_tokens_per_rank", "is_token_in_rank", "num_tokens_per_expert"
    return dict(zip(names, (per_rank, in_rank, per_expert), strict=True))


def with_topk(buffer: Buffer, given: Batch) -> dict[str, Any]:
    return {**layout(buffer, given), "topk_idx": given.ids, "topk_weights": given.weights}


def drawn(
    group: weft.Group, tokens: tuple[int, ...] = TOKENS, seed: int = 0
) -> tuple[list[Batch], Batch, Expected]:
    """Return every rank's batch, this rank's on its device, and what this rank receives."""
    batches = [batch(rank, tokens, seed) for rank in range(group.size)]
    return batches, on(group, batches[group.rank]), expected(batches, group.rank)


def sent(buffer: Any, given: Batch) -> tuple[torch.Tensor, NormalHandle]:
    """Dispatch in bfloat16; return the received rows and the handle."""
    x, _, _, _, handle, _ = buffer.dispatch(given.x, **layout(buffer, given))
    return x, handle


def made(buffer: Buffer, kind: type[RowExchange]) -> list[Any]:
    return [each for each in buffer._normal.exchanges.values() if isinstance(each, kind)]


def same(got: torch.Tensor | None, want: torch.Tensor) -> None:
    assert got is not None
    assert got.dtype == want.dtype
    assert torch.equal(bits(got.cpu()), bits(want))


def check_x(got: Any, want: Expected, fp8: bool) -> Any:
    """Check received rows, and return them in bfloat16."""
    if not fp8:
        same(got, want.x)
        return got
    numbers, scales = got
    sent, its_scales = Batch(want.x, want.ids, want.weights).fp8()
    same(numbers, sent)
    same(scales, its_scales.contiguous())
    widened = numbers.float().unflatten(-1, (-1, 128)) * scales[..., None]
    return widened.flatten(-2).bfloat16()


def check_topk(ids: Any, weights: Any, want: Expected) -> None:
    """Check ids and weights; rows after those that arrived have none."""
    rows = len(want.x)
    same(ids[:rows], want.ids)
    same(weights[:rows], want.weights)
    assert bool((ids[rows:] == -1).all())
    assert not bool(weights[rows:].any())


def own_test(group, tokens):
    """Make the calls of deep_ep's own test, in its order, with every form of the arguments."""
    buffer: Any = Buffer(group, int(2e9), 0, num_qps_per_rank=1, explicitly_destroy=True)
    batches, own, want = drawn(group, tokens)
    assert buffer.is_sm90_compiled()
    forms = ((0, 1, 0, 1), (1, 0, 1, 1), (1, 1, 0, 0), (0, 0, 1, 0))
    for previous, finishes, fp8, has_topk in (map(bool, form) for form in forms):
        again: dict[str, Any] = {"config": Config(24, 8, 256), "async_finish": finishes}
        if previous:
            own, want = own._replace(ids=own.ids.int()), want._replace(ids=want.ids.int())
            again["previous_event"] = buffer.capture()
        args = {**again, **(with_topk if has_topk else layout)(buffer, own)}
        inputs = own.fp8() if fp8 else own.x
        got, ids, weights, counts, handle, event = buffer.dispatch(inputs, **args)
        event.current_stream_wait()
        assert counts == want.counts
        x, prefix = check_x(got, want, fp8), handle[0]
        sizes = [int(goes_to(b.ids, group.rank, group.size).sum()) for b in batches]
        assert prefix[:, group.rank].tolist() == list(itertools.accumulate(sizes))
        same(handle[3], want.tokens)
        if has_topk:
            check_topk(ids, weights, want)
            rows, bound = len(want.x), max(*tokens, 1) * group.size
            got, ids, received, counts, most, _ = buffer.dispatch(
                inputs, **args, num_worst_tokens=bound
            )
            assert (counts, len(ids), len(received), len(most[3])) == ([], bound, bound, bound)
            check_x(tuple(t[:rows] for t in got) if fp8 else got[:rows], want, fp8)
            check_topk(ids, received, want)
        else:
            assert (ids, weights) == (None, None)
            got, *nothing, _ = buffer.dispatch(inputs, handle=handle, **again)
            assert nothing == [None] * 4
            check_x(got, want, fp8)
        out, sums, event = buffer.combine(x, handle, weights, **again)
        event.current_stream_wait()
        assert event.event is None or finishes
        if not fp8:
            same(out, summed(batches[group.rank], group.size))
        if has_topk:
            same(sums, torch.where(own.ids >= 0, own.weights, 0.0).cpu())
        else:
            assert sums is None
    buffer.check()
    buffer.destroy()
    buffer.destroy()


@pytest.mark.parametrize("kind", [CPU, *ANY])
@pytest.mark.parametrize("tokens", [TOKENS, (0, 4, 0), (5,)])
def test_deep_eps_own_test(ranks, kind, tokens):
    ranks(len(tokens), kind)(own_test, tokens)


@on_ranks(2)
@buffered()
def test_biases_are_added_one_after_the_other(group, buffer):
    _, own, _ = drawn(group)
    x, handle = sent(buffer, own)
    plain = buffer.combine(x, handle)[0].float()
    one, two = own.x * 3, -own.x / 2
    same(buffer.combine(x, handle, bias=one)[0], (plain + one.float()).bfloat16().cpu())
    both = (plain + one.float()).bfloat16().float() + two.float()
    same(buffer.combine(x, handle, bias=(one, two))[0], both.bfloat16().cpu())


@on_ranks(2)
@buffered()
def test_memory_grows_on_all_ranks_together(group, buffer):
    """Dispatch more tokens than before, on one rank only; older handles stay valid."""
    first: Any = ()
    for tokens, most in (((3, 5), 64), ((3, 130), 256), ((300, 0), 512), ((1, 1), 512)):
        batches, own, want = drawn(group, tokens)
        x, _, _, counts, handle, _ = buffer.dispatch(own.x, **layout(buffer, own))
        same(x, want.x)
        assert counts == want.counts
        same(buffer.combine(x, handle)[0], summed(batches[group.rank], group.size))
        first = first or (x, handle, batches[group.rank])
        assert [fetch.max_tokens for fetch in made(buffer, RowFetch)] == [most]
    x, handle, own = first
    same(buffer.combine(x, handle)[0], summed(own, group.size))


@on_ranks(2)
@buffered()
def test_calls_raise_while_the_group_is_asleep(group, buffer):
    """A handle is valid afterwards."""
    batches, own, want = drawn(group)
    x, handle = sent(buffer, own)
    for _ in range(2):  # without an exchange for combines, and with one
        group.sleep()
        for call in (partial(sent, buffer, own), partial(buffer.combine, x, handle)):
            with pytest.raises(OutOfOrder, match="asleep"):
                call()
        with pytest.raises(OutOfOrder, match="asleep"):
            buffer.dispatch(own.x, handle=handle)
        group.wake()
        same(buffer.combine(x, handle)[0], summed(batches[group.rank], group.size))
        same(sent(buffer, own)[0], want.x)


@on_ranks(2)
@buffered()
def test_an_invalid_argument_on_one_rank_raises_on_every_rank(group, buffer):
    """Before rows are sent. If the host does not wait, such ids are dropped and reported."""
    (batches, own, want), ranks = drawn(group), group.size
    args, last = with_topk(buffer, own), group.rank == ranks - 1
    bad: list[tuple[type[Exception], dict[str, Any], str]] = []
    for value in (EXPERTS, -2, 1 << 40):
        ids = own.ids.clone()
        if last:
            ids[0, 0] = value
        text = r"rank 1 has 1 entries outside of -1\.\.11"
        bad.append((BadExpertId, {"topk_idx": ids}, text))
    more = {name: args[name].repeat(1, 2 if last else 1) for name in ("topk_idx", "topk_weights")}
    text = (
        r"rank [01] called dispatch with top_k \(0: no topk_idx\) [36], but this rank, [01], with"
    )
    bad.append((GeometryMismatch, more, text))
    rows, scales = own.fp8()
    text = r"called dispatch with integer scales \(1: yes\) [01], but this rank, [01], with"
    quantised = rows, scales.view(torch.int32) if last else scales
    bad.append((GeometryMismatch, {"x": quantised}, text))
    counts = args["num_tokens_per_rank"] + last
    text = "num_tokens_per_rank of rank 1 is .* pass both"
    bad.append((InvalidArgument, {"num_tokens_per_rank": counts}, text))
    for error, change, text in bad:
        with pytest.raises(error, match=text):
            buffer.dispatch(**{"x": own.x, **args, **change})
    x, handle = sent(buffer, own)
    same(x, want.x)
    same(buffer.combine(x, handle)[0], summed(batches[group.rank], ranks))
    ids = own.ids.clone()
    ids[:, 0] = EXPERTS if last else -1
    bound: dict[str, Any] = {"num_worst_tokens": ranks * max(TOKENS)}
    _, got, *_ = buffer.dispatch(own.x, **{**args, "topk_idx": ids}, **bound)
    assert int(got.max()) < EXPERTS // ranks
    if last:
        with pytest.raises(BadExpertId, match=f"{len(ids)} entries of topk_idx"):
            buffer.check()


@on_ranks(2)
@buffered()
def test_rows_beyond_a_bound_of_one_rank_are_dropped(group, buffer):
    batches = [batch(r) for r in range(group.size)]
    every = torch.tensor([0, EXPERTS // 2, -1])  # both ranks
    batches = [b._replace(ids=every.repeat(len(b.ids), 1)) for b in batches]
    own, want = on(group, batches[group.rank]), expected(batches, group.rank)
    bound = (10, 18)[group.rank]
    args = with_topk(buffer, own)
    got, ids, _, _, handle, _ = buffer.dispatch(own.x, **args, num_worst_tokens=bound)
    same(got[:14], want.x[:bound])
    same(ids[:14], want.ids[:bound])
    buffer.combine(got, handle)
    synchronize(group.device)
    if group.rank == 0:
        with pytest.raises(TokenOverflow):
            buffer.check()


@on_ranks(1, "threads")
def test_invalid_arguments_are_refused(group):
    buffer, other, own = Buffer(group), Buffer(group), on(group, batch(group.rank))
    args, topk = layout(buffer, own), {"topk_idx": own.ids, "topk_weights": own.weights}
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
    worst = {**args, **topk, "num_worst_tokens": 4}
    send, combine = buffer.dispatch, buffer.combine
    calls: list[tuple[type[Exception], Any, str]] = [
        (InvalidArgument, lambda: Buffer(group, 8, 8), "num_rdma_bytes is 8; it must be 0"),
        (InvalidArgument, lambda: Buffer(group, enable_shrink=True), "enable_shrink is True"),
        (TokenOverflow, lambda: send(own.x, **worst), "num_worst_tokens is 4, but this rank, one"),
        (
            InvalidArgument,
            lambda: combine(x, handle, bias=(own.x, x.float())),
            r"bias\[1\] has dtype",
        ),
        (OutOfOrder, lambda: other.combine(x, handle), "belongs to another buffer"),
        (OutOfOrder, lambda: other.dispatch(own.x, handle), "belongs to another buffer"),
        (
            *(InvalidArgument, lambda: buffer.low_latency_dispatch(own.x, own.ids, 8, EXPERTS)),
            "low_latency_mode is False; it must be True",
        ),
    ]
    for error, call, text in calls:
        with pytest.raises(error, match=text):
            call()
    buffer.destroy()
    other.destroy()
    late = lambda: combine(x, handle), lambda: send(own.x, handle)
    for call in (*late, lambda: buffer.get_dispatch_layout(own.ids, EXPERTS)):
        with pytest.raises(OutOfOrder, match="destroyed"):
            call()


@on_ranks(2)
@buffered(low_latency_mode=True, num_qps_per_rank=24, allow_mnnvl=False)
def test_both_modes_of_one_buffer_as_sglang_calls_them(group, buffer):
    """Events are chained, and counts are rounded to DeepGEMM's alignment."""
    batches, own, want = drawn(group)
    for finishes in (False, True, False):
        previous = buffer.capture() if finishes else None
        flags: dict[str, Any] = {"async_finish": finishes, "allocate_on_comm_stream": finishes}
        *_, event = buffer.get_dispatch_layout(own.ids, EXPERTS, previous, **flags)
        args = {**with_topk(buffer, own), "num_tokens_per_rdma_rank": None, "config": None}
        got, ids, weights, counts, handle, event = buffer.dispatch(
            own.fp8(), **args, expert_alignment=128, previous_event=event, **flags
        )
        event.current_stream_wait()
        assert counts == [-(-n // 128) * 128 for n in want.counts]
        check_topk(ids, weights, want)
        check_x(got, want, True)
        flags["previous_event"] = buffer.capture() if finishes else None
        out, _, event = buffer.combine(want.x.to(group.device), handle, config=None, **flags)
        event.current_stream_wait()
        same(out, summed(batches[group.rank], group.size))
        buffer.clean_low_latency_buffer(16, HIDDEN, EXPERTS)
        rows, _, low, _, _ = buffer.low_latency_dispatch(own.x, own.ids, 16, EXPERTS, use_fp8=False)
        out = buffer.low_latency_combine(rows, own.ids, own.weights, low)[0]
        kept = torch.where(own.ids >= 0, own.weights, 0.0).sum(dim=1, keepdim=True)
        assert torch.allclose(out.float(), own.x.float() * kept, rtol=2e-2, atol=2e-2)


@buffered()
def none_made(group, buffer):
    own = on(group, batch(group.rank))
    text = f"a dispatch to {EXPERTS} experts is new in a graph capture"
    with pytest.raises(InvalidArgument, match=text):
        buffer.dispatch(own.x, **layout(buffer, own))


def test_a_capture_makes_no_exchange(ranks, monkeypatch):
    monkeypatch.setattr(checks, "is_capturing", lambda device: True)
    ranks(2, "threads")(none_made)


@on_ranks(2, "cpu")
@buffered()
def test_a_kernel_that_one_rank_cannot_load(group, buffer):
    """No rank keeps the exchange, and a retry works."""
    batches, own, _ = drawn(group)
    with pytest.MonkeyPatch.context() as patch:
        if group.rank:
            patch.setattr(row_exchange, "load_kernel", None)
        text = "a row exchange failed on rank 1 of 2"
        with pytest.raises(errors.CreationFailed, match=text):
            buffer.dispatch(own.x, **layout(buffer, own))
        assert not made(buffer, RowFetch)
    same(buffer.combine(*sent(buffer, own))[0], summed(batches[group.rank], group.size))


@on_ranks(2, "cuda")
@buffered()
def test_streams_that_wait_only_for_the_passed_events(group, buffer):
    batches, own, want = drawn(group, (300, 200))
    args = layout(buffer, own)
    torch.cuda.synchronize()
    streams: list[Any] = [torch.cuda.Stream() for _ in range(2)]
    kept = []
    for turn in range(6):
        with torch.cuda.stream(streams[turn % 2]):
            x, _, _, _, handle, event = buffer.dispatch(own.x, **args, async_finish=True)
        with torch.cuda.stream(streams[(turn + turn // 2) % 2]):
            out, _, _ = buffer.combine(x, handle, previous_event=event)
        kept.append((x, out))
    torch.cuda.synchronize()
    for x, out in kept:
        same(x, want.x)
        same(out, summed(batches[group.rank], group.size))
