"""Results that are summed and sent in one kernel, whole or by columns: the bits of scatter."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.groups import settle
from tests.ops.test_failures import COMBINE_ENTER, JITTER, STAY_AWAY, plan_fault
from tests.rounds import Round, bits
from tests.sending import PARTS, make, results, round_trip, scattered, sent_in
from weft.errors import InvalidArgument, OutOfOrder, PeerTimeout, TokenOverflow
from weft.ops.grouping import Compactor, ExpertGroups

KINDS = ["cpu", "threads", pytest.param("cuda", marks=pytest.mark.gpu)]
CASES = {
    "holes": Round(tokens=(16, 5, 0), router="holes", hidden=640, add=True),
    "top 1": Round(tokens=(3, 16, 9), top_k=1, hidden=2048),
    "top 16": Round(tokens=(16, 16, 16), top_k=16, experts=40, hidden=1152),
    "one rank's experts": Round(tokens=(7, 1, 16), router="one-hot", hidden=384),
    "nobody": Round(tokens=(0, 0, 0), hidden=128),
    "fp16": Round(tokens=(2, 16, 3), dtype=torch.float16, hidden=512, add=True),
    "fp32": Round(tokens=(16, 4, 8), dtype=torch.float32, hidden=896),
    "large": Round(tokens=(4, 5, 6), hidden=7168, top_k=8, experts=256),
}
GROUPS: dict[str, dict[str, object]] = {
    "contiguous": {"align": 16},
    "masked": {"layout": "masked"},
    "too few rows": {"max_rows": 24},
    "too few masked rows": {"layout": "masked", "max_rows": 2},
}


def same_bits(group: weft.Group, way: str, names: list[str], options: dict[str, object]) -> None:
    for case in (CASES[name] for name in names):
        with make(group, case, combine_by=way, **options) as a2a:
            wide = case.top_k < 16 and case.router != "holes"
            for option in list(GROUPS.values())[: 1 if wide else None]:
                groups = ExpertGroups(a2a, **option)  # type: ignore[arg-type]
                for seed in range(2):
                    turned = case.tokens[seed:] + case.tokens[:seed]
                    now = case.next(seed=seed, tokens=turned)
                    wanted = round_trip(a2a, groups, now, scattered)
                    for parts in PARTS.values():
                        got = round_trip(a2a, groups, now, sent_in(parts))
                        assert torch.equal(bits(got), bits(wanted))
                groups.close()
            settle(group.device)
            try:
                a2a.check()
            except TokenOverflow:
                assert case.tokens != (0, 0, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["push", "fp8"])
def test_sums_that_are_sent_have_the_bits_of_scatter(ranks, kind, way):
    ranks(3, kind)(same_bits, way, list(CASES), {})


@pytest.mark.parametrize("way", ["push", "fp8"])
def test_experts_where_a_map_says(ranks, way):
    options = {"expert_map": [2, 0, 0, 1, 2, 0, 2, 2, 1, 0, 0, 0, 2, 2, 1, 0]}
    ranks(3, "threads")(same_bits, way, ["holes"], options)
    # A rank without experts has nothing to send, and tells so.
    ranks(3, "threads")(same_bits, way, ["holes"], {"expert_map": [0, 2] * 8})


def odd_rows(group: weft.Group) -> None:
    """Rows that are no whole number of parts, or of warps."""
    case = Round(tokens=(9, 16), hidden=264)
    with make(group, case, combine_by="push") as a2a:
        groups = ExpertGroups(a2a)
        wanted = round_trip(a2a, groups, case, scattered)
        for parts in (1, 2, 3):
            got = round_trip(a2a, groups, case, sent_in(parts))
            assert torch.equal(bits(got), bits(wanted))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_any_length(ranks, kind):
    ranks(2, kind)(odd_rows)


def refusals(group: weft.Group) -> None:
    case = Round(tokens=(4, 4), hidden=512)
    x, ids, weights, _ = case.of(group.rank, group.device)
    for options, words in (
        ({"combine_by": "pull"}, "combine_by='push' or 'fp8'"),
        ({"combine_by": "push", "halves": False}, "halves=True"),
    ):
        with make(group, case, **options) as a2a:
            groups = ExpertGroups(a2a)
            grouped = groups.gather(a2a.dispatch(x, ids, weights))
            with pytest.raises(InvalidArgument, match=words):
                groups.send(grouped.x)
            groups.scatter(grouped.x)
            a2a.combine()
    with make(group, case, combine_by="push") as a2a:
        groups, other = ExpertGroups(a2a), ExpertGroups(a2a)
        y = torch.zeros(groups._y_shape, dtype=a2a.dtype, device=group.device)
        with pytest.raises(OutOfOrder, match="expects dispatch"):
            groups.send(y)
        received = a2a.dispatch(x, ids, weights)
        with pytest.raises(OutOfOrder, match="send without a gather"):
            groups.send(y)
        y = results(groups, groups.gather(received), 1, a2a.dtype)
        for columns, words in (
            ((0, 100), "multiples of 128"),
            ((64, 128), "multiples of 128"),
            ((0, 640), "multiples of 128"),
            ((-128, 128), "multiples of 128"),
            ((0, 0), "multiples of 128"),
            ((0.0, 128), "two integers"),
            (128, "two integers"),
            ((0, 128, 256), "two integers"),
        ):
            with pytest.raises(InvalidArgument, match=words):
                groups.send(y, columns=columns)  # type: ignore[arg-type]
        with pytest.raises(OutOfOrder, match="the next begins at 0"):
            groups.send(y, columns=(128, 256))
        with pytest.raises(InvalidArgument, match="y has shape"):
            groups.send(y[:, :128].contiguous(), columns=(0, 128))
        with pytest.raises(InvalidArgument, match="num_sms is 0|num_sms=0"):
            groups.send(y, num_sms=0)
        groups.send(y, columns=(0, 256))
        for call in (a2a.combine, a2a.combine_send, a2a.combine_recv):
            with pytest.raises(OutOfOrder, match="expects the next columns"):
                call()
        with pytest.raises(OutOfOrder, match="outside of a round"):
            groups.scatter(y)
        with pytest.raises(OutOfOrder, match="outside of a round"):
            groups.gather(received)
        with pytest.raises(OutOfOrder, match="expects the next columns"):
            other.send(y)
        for part in (None, (0, 256), (384, 512)):
            with pytest.raises(OutOfOrder, match="the next begins at 256"):
                groups.send(y, columns=part)
        groups.send(y, columns=(256, 512))
        with pytest.raises(OutOfOrder, match="expects combine_recv"):
            groups.send(y)
        with pytest.raises(OutOfOrder, match="expects combine_recv"):
            a2a.combine_send()
        a2a.combine_recv()
        received = a2a.dispatch(x, ids, weights)
        with pytest.raises(OutOfOrder, match="send without a gather"):
            groups.send(y)
        groups.gather(received)
        groups.send(y)
        a2a.combine_recv()
        groups.close()
        with pytest.raises(OutOfOrder, match="after close"):
            groups.send(y)
        assert not hasattr(Compactor(a2a), "send")


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_host_refuses(ranks, kind):
    ranks(2, kind)(refusals)


def disturbed(group: weft.Group) -> None:
    """A rank whose parts are late changes no byte; one that stays away is named."""
    case = Round(tokens=(8, 16, 3), hidden=512)
    options = {"combine_by": "push", "timeout": 2.0, "_defines": ("WEFT_FAULTS=1",)}
    with make(group, case, **options) as a2a:
        groups = ExpertGroups(a2a)
        wanted = round_trip(a2a, groups, case, scattered)
        if group.rank == 1:
            plan_fault(a2a, COMBINE_ENTER, JITTER, argument=400_000)
        for _ in range(8):
            assert torch.equal(bits(round_trip(a2a, groups, case, sent_in(3))), bits(wanted))
        if group.rank == 1:
            plan_fault(a2a, COMBINE_ENTER, STAY_AWAY)
        with pytest.raises(PeerTimeout, match="rank 1 did not publish"):
            finished(a2a, groups, case)


def finished(a2a: weft.AllToAll, groups: ExpertGroups, case: Round) -> None:
    round_trip(a2a, groups, case, sent_in(3))
    settle(a2a.group.device)
    a2a.check()


@pytest.mark.parametrize("kind", KINDS)
def test_late_and_absent_parts(ranks, kind):
    ranks(3, kind)(disturbed)


def captured(group: weft.Group, way: str) -> None:
    """Products in one stream, sends in another, in one graph, replayed with other tokens."""
    case = Round(tokens=(16, 16), hidden=2048, top_k=4)
    with make(group, case, combine_by=way) as a2a, make(group, case, combine_by=way) as plain:
        groups, beside = ExpertGroups(a2a), ExpertGroups(plain)
        x, ids, weights, _ = (t.clone() for t in case.of(group.rank, group.device))
        y = torch.zeros(groups._y_shape, dtype=a2a.dtype, device=group.device)
        w = torch.randn((case.hidden, case.hidden), device=group.device).to(a2a.dtype) / 45
        out, other = torch.empty_like(x), torch.cuda.Stream()

        def overlapped() -> None:
            grouped = groups.gather(a2a.dispatch(x, ids, weights))
            for first in range(0, case.hidden, 512):
                y[:, first : first + 512] = grouped.x @ w[:, first : first + 512]
                other.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(other):
                    groups.send(y, columns=(first, first + 512), num_sms=8)
            with torch.cuda.stream(other):
                a2a.combine_recv(out=out)
            torch.cuda.current_stream().wait_stream(other)

        overlapped()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            overlapped()
        for seed in range(6):
            fresh = case.next(seed=seed).of(group.rank, group.device)
            for mine, new in zip((x, ids, weights), fresh[:3], strict=True):
                mine.copy_(new)
            graph.replay()
            beside.gather(plain.dispatch(x, ids, weights))
            beside.scatter(y)
            assert torch.equal(bits(plain.combine()), bits(out))
        a2a.check()


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["push", "fp8"])
def test_a_captured_round_by_columns(ranks, way):
    ranks(2, "cuda")(captured, way)
