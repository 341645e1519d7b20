# SPDX-License-Identifier: Apache-2.0
"""flashinfer.comm's all-to-all: rounds exact to the byte, shared workspaces, and their groups."""

import gc
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import weft
from tests.compat import calls
from tests.compat.calls import EXPERTS, HIDDEN, MAX, RANKS, TOP_K, make, refused, routing
from tests.ranks import on_ranks
from tests.rounds import bits
from weft import errors, leases, reference
from weft.compat import checks, fusion_workspace, moe_alltoall, triton_dist
from weft.compat import ranks as places
from weft.compat.flashinfer import MoeAlltoAll, moe_a2a_get_workspace_size_per_rank
from weft.compat.moe_workspace import MoeWorkspace
from weft.errors import GeometryMismatch, InvalidArgument, OutOfOrder, PeerLeft, TokenOverflow

BF16 = torch.bfloat16
INVALID = EXPERTS  # SGLang passes the number of experts, whose kernels skip ids from there on
ROUTING = weft.Payload((TOP_K,), torch.int32), weft.Payload((TOP_K,), torch.float32)
PLAIN = (weft.Payload((HIDDEN,), BF16), *ROUTING)
FP8 = weft.Payload((HIDDEN,), torch.float8_e4m3fn)
QUANTISED = (FP8, weft.Payload((3,), torch.uint8), *ROUTING)  # scales in rows that memory pads
MXFP8 = (FP8, weft.Payload((HIDDEN // 32,), torch.uint8), *ROUTING)
NVFP4 = (*(weft.Payload((HIDDEN // n,), torch.uint8) for n in (2, 16)), *ROUTING)
WAYS, FP8_ROWS = ("in place", "copied", "in place, unsaid"), "copied as FP8"
SIZES: dict[str, Any] = {"max_num_tokens": MAX, "top_k": TOP_K, "num_experts": EXPERTS}


def workspace_of(a2a: MoeAlltoAll) -> MoeWorkspace:
    assert a2a._workspace is not None
    return a2a._workspace


def held() -> list[MoeWorkspace]:
    shared = [each for known in list(leases._leases_by_group.values()) for each in known.values()]
    return [each.operator for each in shared if isinstance(each.operator, MoeWorkspace)]


@pytest.fixture(autouse=True)
def _nothing_is_kept() -> Iterator[None]:
    yield
    gc.collect()
    assert not held()
    assert not places._shared_groups


def rows(seed: int, rank: int, tokens: int, kinds: tuple[weft.Payload, ...]) -> list[torch.Tensor]:
    """Return the payloads of one rank; the last two are its ids and weights."""
    generator = torch.Generator().manual_seed(1000 + 100 * seed + rank)
    tensors = []
    for row in kinds[:-2]:
        noise = torch.randint(0, 127, (tokens, *row.shape), generator=generator)
        tensors.append((noise / 64).to(row.dtype) if row.dtype.is_floating_point else noise.byte())
    return [*tensors, *routing(seed, rank, tokens)]


def zeros(tokens: int) -> torch.Tensor:
    return torch.zeros((RANKS, tokens, HIDDEN), dtype=BF16)


def check_received(
    received: list[torch.Tensor], sent: list[list[torch.Tensor]], rank: int, most: int, invalid: int
) -> None:
    """Assert that rows with a token equal the source's, and other rows have id `invalid`."""
    for source, tensors in enumerate(sent):
        ids = tensors[-2]
        carried = torch.isin(ids, calls.experts_of(rank)).any(dim=1)
        want = torch.full((most, TOP_K), invalid, dtype=torch.int32)
        want[: len(ids)] = torch.where(carried[:, None], ids, invalid)
        assert torch.equal(received[-2][source].cpu(), want)
        for plane, tensor in enumerate(tensors):
            got = received[plane][source, : len(ids)].cpu()
            assert got.dtype == tensor.dtype
            assert torch.equal(bits(got[carried]), bits(tensor[carried]))


def play(
    a2a: MoeAlltoAll,
    kinds: tuple[weft.Payload, ...] = PLAIN,
    tokens: tuple[int, ...] = (2, 0, 1),
    most: int = 2,
    way: str = "copied",
    seed: int = 0,
    invalid: int = INVALID,
) -> None:
    """Play one round. way: one of WAYS, "copied" as vLLM and "in place" as SGLang, or FP8."""
    device, rank = a2a.group.device, a2a.ep_rank
    sent = [rows(seed, r, tokens[r], kinds) for r in range(RANKS)]
    own = [t.to(device) for t in sent[rank]]
    received = a2a.dispatch(
        token_selected_experts=own[-2], input_payloads=own, runtime_max_tokens_per_rank=most,
        invalid_token_expert_id=invalid, expert_id_payload_index=len(own) - 2,
    )  # fmt: skip
    assert [t.shape[:2] for t in received] == [(RANKS, most)] * len(own)
    assert all(t.is_contiguous() for t in received)
    check_received(received, sent, rank, most, invalid)
    y, output = calls.identity(received, calls.experts_of(rank).to(device)), None
    if way in ("copied", FP8_ROWS):
        payload, output = y, torch.full((len(own[0]), HIDDEN), float("nan")).bfloat16().to(device)
    else:
        payload = a2a.get_combine_payload_tensor_in_workspace(most, HIDDEN, BF16)
        payload.copy_(y)
    a2a.check()
    result = a2a.combine(
        payload=payload, runtime_max_tokens_per_rank=most,
        payload_in_workspace=way == "in place", output=output, use_low_precision=way == FP8_ROWS,
    )  # fmt: skip
    assert output is None or result is output
    x, *_, ids, weights = sent[rank]
    x = calls.values(x)
    back: Any = {"combine_dtype": "fp8" if way == FP8_ROWS else None}
    want = reference.identity_round_trip(x, ids, weights, calls.PLACEMENT, ranks=RANKS, **back)
    assert torch.equal(bits(result.cpu()), bits(want))


@on_ranks(RANKS, "cpu", "threads", "cuda")
def test_rounds_are_right_to_the_byte(group):
    sizes = [((3, 1, 5), 5), ((8, 8, 8), 8), ((0, 2, 0), 2), ((0, 0, 0), 1), ((1, 6, 2), MAX)]
    sized: dict[str, Any] = {"hidden_size": None, "workspace_size_per_rank": 1 << 20}
    for changes, ways in (({}, WAYS), (sized, WAYS), (sized, (FP8_ROWS,))):
        with make(group, **changes) as a2a:
            for seed, (tokens, most) in enumerate(sizes):
                for way in ways:
                    for kinds in (PLAIN, QUANTISED):  # lists alternate, as layers of a model do
                        play(a2a, kinds, tokens, most, way, seed)


# Layers of one model: what each dispatches, and the tokens of each rank.
LAYERS = [(MXFP8, (2, 0, 3)), (PLAIN, (2, 0, 3)), (NVFP4, (5, 8, 1)), (MXFP8, (0, 0, 1))]


def as_engines(group: weft.Group, padding: int = 0) -> MoeAlltoAll:
    """Construct the object as SGLang 0.5.17, 0.5.23 and vLLM do."""
    size = moe_a2a_get_workspace_size_per_rank(
        ep_size=RANKS, max_num_tokens=MAX, combine_payload_size_per_token=HIDDEN * 2,
        total_dispatch_payload_size_per_token=HIDDEN * 2 + TOP_K * 4 + TOP_K * 4,
    )  # fmt: skip
    return MoeAlltoAll(
        mapping=calls.Mapping(group.rank, group.size), **SIZES,
        workspace_size_per_rank=size + padding,
        mnnvl_config=SimpleNamespace(comm_backend=calls.Backend(group)),
    )  # fmt: skip


@on_ranks(RANKS, "cpu", "threads", "cuda")
def test_calls_of_engines(group):
    """One object per layer, in place or copied, and in SGLang 0.5.23 a larger one for prefill."""
    a2as, prefill = [as_engines(group) for _ in LAYERS], as_engines(group, padding=2 * 128)
    for step in range(3):
        for layer, (a2a, (kinds, tokens)) in enumerate(zip(a2as, LAYERS, strict=True)):
            own: dict[str, Any] = {"way": "copied", "invalid": -1} if layer % 2 else {}
            own = {"way": "in place", "seed": 10 * step + layer, **own}
            play(a2a, kinds, tokens, max(tokens), **own)
    # A round of decode may be open while prefill has its own.
    own_rows = [t.to(group.device) for t in rows(0, group.rank, 2, PLAIN)]
    a2as[0].dispatch(own_rows[1], own_rows, 2)
    play(prefill, PLAIN, (8, 8, 8), 8, invalid=-1)
    a2as[0].combine(zeros(2).to(group.device), 2)
    for a2a in (*a2as, prefill):
        a2a.check()
        a2a.close()


@on_ranks(RANKS, "threads")
def test_statistics_are_gathered_until_combine(group):
    load = [torch.arange(EXPERTS, dtype=torch.int32) * (rank + 1) for rank in range(RANKS)]
    own = rows(0, group.rank, group.rank, PLAIN)
    with make(group, eplb_stats_num_experts=EXPERTS) as a2a:
        # In the last round two ranks send nothing, which counts as zeros.
        for senders in ((0, 1, 2), (), (0, 1, 2), (1,)):
            assert a2a.eplb_gathered_stats is None
            stats = load[group.rank] if group.rank in senders else None
            a2a.dispatch(own[1], own, MAX, eplb_local_stats=stats)
            if senders == (0, 1, 2) or stats is not None:
                want = torch.stack([load[r] * (r in senders) for r in range(RANKS)])
                gathered: Any = a2a.eplb_gathered_stats
                assert torch.equal(gathered, want)
            group.barrier()
            a2a.combine(zeros(MAX), MAX)
        for wrong, *words in ((load[0][1:], "[6]", "[7]"), (load[0].long(), "int64", "int32")):
            send = lambda wrong=wrong: a2a.dispatch(own[1], own, 8, eplb_local_stats=wrong)  # noqa: E731
            refused(InvalidArgument, send, "eplb_local_stats", *words)


@on_ranks(RANKS, "threads")
def test_each_payload_list_has_its_own_memory(group):
    """From its first round on, by sizes, not dtypes; a list that ranks disagree about raises."""
    get_size = MoeAlltoAll.get_moe_workspace_size_per_rank
    size, row = get_size(RANKS, TOP_K, MAX, HIDDEN), HIDDEN * 2 + TOP_K * 8
    assert moe_a2a_get_workspace_size_per_rank(RANKS, MAX, row, HIDDEN * 2) >= size
    with make(group) as a2a:
        operators = workspace_of(a2a)._operators
        for seed, kinds in enumerate((PLAIN, QUANTISED, PLAIN, QUANTISED)):
            play(a2a, kinds, seed=seed)
            assert len(operators) == min(seed + 1, 2)
        first = next(iter(operators.values()))
        assert a2a.workspace_size_per_rank == first.heap.size == size
        assert size < get_size(RANKS, TOP_K, MAX, HIDDEN, 16)
        # A rank without tokens may know them by another dtype of the same size.
        own = rows(7, group.rank, 2 if group.rank else 0, QUANTISED)
        kind = torch.float8_e4m3fn if group.rank else torch.uint8
        own[0] = own[0].view(kind)
        assert a2a.dispatch(own[-2], own, 2)[0].dtype == kind
        a2a.combine(zeros(2), 2)
        assert len(operators) == 2
    quantised = rows(0, group.rank, 2, QUANTISED)
    ids = quantised[-2]
    with make(group) as a2a:
        mixed = quantised if group.rank else quantised[1:]
        refused(GeometryMismatch, lambda: a2a.dispatch(ids, mixed, 2), "payloads", "rank 1")
        refused(InvalidArgument, lambda: a2a.dispatch(ids, [ids] * 9, 2), "9 payload")
        play(a2a, QUANTISED)


def captured(group: weft.Group, capturing: list[bool]) -> None:
    """A capture cannot allocate memory, but can use existing memory."""
    with make(group) as a2a:
        play(a2a)
        group.barrier()
        capturing[0] = True
        quantised = rows(0, group.rank, 2, QUANTISED)
        call = lambda: a2a.dispatch(quantised[-2], quantised, 2)  # noqa: E731
        refused(InvalidArgument, call, "graph capture", f"{HIDDEN}, 3, 8, 8", "one such round")
        play(a2a, seed=1)
        group.barrier()
        capturing[0] = False
        group.barrier()
        play(a2a, QUANTISED)


def test_a_capture_makes_no_workspace(ranks, monkeypatch):
    capturing = [False]
    monkeypatch.setattr(checks, "is_capturing", lambda device: capturing[0])
    ranks(RANKS, "threads")(captured, capturing)


@pytest.mark.parametrize("inside", [False, True])
@on_ranks(RANKS, "threads")
def test_combine_determines_the_returned_rows(group, inside):
    ids, weights = routing(3, group.rank, 2 + group.rank)
    x = torch.ones((len(ids), HIDDEN), dtype=BF16)
    limit, narrow, half = 2 + RANKS, HIDDEN // 2, torch.float16
    hits = [torch.isin(ids, calls.experts_of(r)).any(dim=1) for r in range(RANKS)]
    right = torch.stack([hit * (r + 1.0) for r, hit in enumerate(hits)]).sum(dim=0)
    with make(group) as a2a:
        for _ in range(3):
            sent = ids.clone()
            seen = a2a.dispatch(sent, [x, sent, weights], limit)[2][group.rank, : len(ids)]
            y = torch.full((RANKS, limit, narrow), group.rank + 1.0, dtype=half)
            if inside:
                y = a2a.get_combine_payload_tensor_in_workspace(limit, narrow, half)
                y.fill_(group.rank + 1.0)
            used = hits[group.rank]
            assert torch.equal(seen[used], weights[used])  # also when another carrier takes y
            sent.fill_(-1)  # the caller's again: combine does not read it
            out = a2a.combine(y, limit, payload_in_workspace=inside)
            assert out.dtype == half
            assert torch.equal(out.float(), right[:, None].expand(-1, narrow))
            assert len(workspace_of(a2a)._operators) == 1  # the guess is given back
        a2a.dispatch(ids, [x, ids, weights], limit)
        wide = torch.ones((RANKS, limit, HIDDEN), dtype=BF16)
        words = f"{HIDDEN}, dtype {BF16}", f"[{narrow}] torch.float16", "another MoeAlltoAll"
        refused(InvalidArgument, lambda: a2a.combine(wide, limit), *words)
        a2a.combine(y.clone(), limit)


@on_ranks(RANKS, "threads")
def test_a_rank_that_left_a_round_is_named(group):
    """The peer raises before the deadline, and objects that share the workspace get the reason."""
    patient = {"timeout": 600.0, "first_timeout": 600.0}
    a2a, other = make(group, **patient), make(group, **patient)
    play(other)
    sent = rows(0, group.rank, 1, PLAIN)
    y = a2a.dispatch(sent[-2], sent, 1)[0].clone()
    if group.rank == 1:
        a2a.close()
    else:
        refused(PeerLeft, lambda: a2a.combine(y, 1), "rank 1 closed its all-to-all")
        a2a.close()
        refused(PeerLeft, lambda: other.dispatch(sent[-2], sent, 1), "rank 1 closed")
    group.barrier()


@on_ranks(RANKS, "threads")
def test_layers_of_equal_sizes_share_one_workspace(group):
    """A round that is never combined ends with its object, closed or dropped."""
    first, second = make(group), make(group)
    assert workspace_of(first) is workspace_of(second)
    plain = rows(0, group.rank, 2, PLAIN)
    first.dispatch(plain[1], plain, 2)
    refused(OutOfOrder, lambda: second.dispatch(plain[1], plain, 2), "2 tokens are dispatched")
    refused(OutOfOrder, lambda: second.combine(zeros(2), 2), "without a dispatch")
    first.combine(zeros(2), 2)
    for seed, closes in enumerate((True, False)):
        play(second, seed=seed)
        first.dispatch(plain[1], plain, 2)
        if closes:
            first.close()
            first.close()
            refused(OutOfOrder, partial(first.dispatch, plain[1], plain, 2), "closed")
        del first
        gc.collect()
        play(second, QUANTISED, seed=seed)
        first = make(group)
        play(first, QUANTISED, seed=seed)
    assert len([each for each in held() if each.group is group]) == 1
    first.close()
    second.close()


@on_ranks(RANKS, "threads")
def test_ranks_meet_through_the_backend_of_the_configuration(group):
    place, wrong = (calls.Mapping(group.rank, size) for size in (group.size, group.size + 1))
    sizes = {**SIZES, "hidden_size": HIDDEN}
    configs = [SimpleNamespace(comm_backend=calls.Backend(group)) for _ in range(2)]
    first, second = (MoeAlltoAll(place, **sizes, mnnvl_config=config) for config in configs)
    assert first.group is second.group
    assert first.group is not group
    play(first)
    first.close()
    assert second.group.all_gather(group.rank) == list(range(RANKS))
    second.close()
    place_words = f"is rank {group.rank} of {RANKS}"
    words = f"of {RANKS + 1}", f"comm_backend {place_words}", "from_torch"
    made = lambda: MoeAlltoAll(wrong, **sizes, mnnvl_config=configs[0])  # noqa: E731
    refused(InvalidArgument, made, *words)
    made = lambda: MoeAlltoAll(wrong, **sizes, group=group)  # noqa: E731
    refused(InvalidArgument, made, f"group {place_words}")


@on_ranks(RANKS, "cpu")
def test_the_default_group_is_torch_distributeds(group):
    world = group.process_group()
    sizes = {**SIZES, "hidden_size": HIDDEN}
    with MoeAlltoAll(calls.Mapping(group.rank, group.size), **sizes) as a2a:
        assert a2a.group is not group
        play(a2a)
    fusion_workspace.AllReduceFusionWorkspace(RANKS, group.rank, MAX, HIDDEN, group=world).destroy()
    if group.rank == 0:  # alone: it waits for no rank
        words = "0 of 2", "the world of torch.distributed"
        refused(InvalidArgument, lambda: MoeAlltoAll(calls.Mapping(0, 2), **sizes), *words)
        made = lambda: fusion_workspace.AllReduceFusionWorkspace(2, 1, MAX, HIDDEN, group=world)  # noqa: E731
        refused(InvalidArgument, made, "1 of 2", f"group is rank 0 of {RANKS}")
    group.barrier()


def test_without_torch_distributed_a_group_is_required_except_of_one_rank():
    with pytest.raises(InvalidArgument, match="torch.distributed is not initialised: call init_pr"):
        places.lease_group(0, 3)
    with MoeAlltoAll(calls.Mapping(0, 1), **SIZES, hidden_size=HIDDEN) as a2a:
        assert a2a.group.size == 1


CONSTRUCTORS: dict[Any, Callable[[], object]] = {
    moe_alltoall: lambda: MoeAlltoAll(calls.Mapping(0, 1), **SIZES, hidden_size=HIDDEN),
    triton_dist: lambda: triton_dist.EPLowLatencyAllToAllLayer(8, 64, 2, True, 0, 7, 1, 1),
    fusion_workspace: lambda: fusion_workspace.AllReduceFusionWorkspace(1, 0, MAX, HIDDEN),
}


@pytest.mark.parametrize("module", CONSTRUCTORS)
def test_a_constructor_that_fails_keeps_no_group(module, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise MemoryError("no operator today")

    for name in {"lease", "LowLatencyAllToAll", "AllReduce"} & set(vars(module)):
        monkeypatch.setattr(module, name, fail)
    with pytest.raises(MemoryError, match="no operator today"):
        CONSTRUCTORS[module]()


@on_ranks(RANKS, "threads")
def test_calls_that_the_original_allows_are_refused(group):
    """In addition to test_arguments.py. A refusal leaves the round alone."""
    mapping, many = calls.Mapping(group.rank, group.size), calls.Mapping(0, 65)
    absent = SimpleNamespace(rank=0, world_size=1)
    words: Any
    for place, changes, *words in (
        (mapping, {"group": group}, "hidden_size and workspace_size_per_rank are None"),
        (absent, {"hidden_size": HIDDEN}, "moe_ep_rank is missing"),
        (
            *(many, {"hidden_size": HIDDEN, "num_experts": 70, "enable_rank_mask": True}),
            *("moe_ep_size with enable_rank_mask is 65", "1..64"),
        ),
    ):
        made = lambda place=place, own=changes: MoeAlltoAll(place, **{**SIZES, **own})  # noqa: E731
        refused(InvalidArgument, made, *words)
    sent, y = rows(0, group.rank, 3, PLAIN), zeros(4)
    x, ids, weights = sent
    with make(group) as a2a:
        send, combine = a2a.dispatch, a2a.combine
        workspace = a2a.get_combine_payload_tensor_in_workspace
        words = "eplb_local_stats is a tensor [2]", "None", "pass eplb_stats_num_experts"
        refused(InvalidArgument, lambda: send(ids, sent, 4, eplb_local_stats=ids[0]), *words)
        refused(InvalidArgument, lambda: send(ids, sent, 4, -1), "payload_index is None", "0..2")
        short = [x[:2], ids, weights]
        refused(InvalidArgument, lambda: send(ids, short, 4), "input_payloads[0]", f"[2, {HIDDEN}]")
        words = "3 tokens", "runtime_max_tokens_per_rank=2"
        refused(TokenOverflow, lambda: send(ids, sent, 2), *words)
        refused(TokenOverflow, lambda: send(ids, sent, 9), "=9", "max_num_tokens=8")
        refused(OutOfOrder, lambda: combine(y, 4), "combine without a dispatch")
        refused(OutOfOrder, lambda: workspace(4, HIDDEN, BF16), "without a dispatch")
        assert a2a.eplb_gathered_stats is None
        send(ids, sent, 4, enable_pdl=True)
        refused(OutOfOrder, lambda: send(ids, sent, 4), "combine of 3 tokens")
        refused(InvalidArgument, lambda: combine(y, 3), "is 3", "with 4")
        refused(InvalidArgument, lambda: combine(y[:, :3], 4), "[3, 3, 128]", "[3, 4, hidden]")
        words = "payload_in_workspace=True", "return"
        refused(InvalidArgument, lambda: combine(y, 4, True), *words)
        workspace(4, HIDDEN, BF16)
        refused(InvalidArgument, lambda: combine(y, 4, True), *words)
        moved = workspace(4, HIDDEN, BF16).view(RANKS, HIDDEN, 4).mT
        refused(InvalidArgument, lambda: combine(moved, 4), "strides")
        narrow = y[..., :64].contiguous()
        refused(InvalidArgument, lambda: combine(narrow, 4, use_low_precision=True), "64", "128")
        out = combine(y, 4, output_dtype=BF16)
        assert out.shape == (3, HIDDEN)
        assert not out.any()


@on_ranks(RANKS, "threads")
def test_invalid_expert_ids_are_dropped_and_reported(group):
    with make(group) as a2a:
        ids = torch.tensor([[0, 99]], dtype=torch.int32)
        x, weights = torch.ones((1, HIDDEN), dtype=BF16), torch.ones((1, 2))
        received = a2a.dispatch(ids, [x, ids, weights], 1, expert_id_payload_index=1)
        if group.rank == 0:
            assert received[1].tolist() == [[[0, 99]]] * RANKS, "ids arrive as sent"
        a2a.combine(zeros(1), 1)
        refused(errors.BadExpertId, a2a.check, "99")
        received = a2a.dispatch(ids, [x, ids, weights], 1, INVALID, 1)
        row = [0, 99] if group.rank == 0 else [INVALID, INVALID]
        assert received[1].tolist() == [[row]] * RANKS
        refused(errors.BadExpertId, a2a.check, "99")
        assert torch.equal(a2a.combine(zeros(1) + 1, 1), x)
