# SPDX-License-Identifier: Apache-2.0
"""The low-latency all-to-all over several hosts: every byte as in its reference."""

import contextlib
from pathlib import Path

import pytest
import torch

import weft
from tests.emulator.operators import EmulatedLow, compile_low
from tests.hosts.spanning import across, campaign, on_hosts, tamper_with_rail
from tests.lowlatency_rounds import Mode, expected_out, expert_results, play
from tests.rounds import Round, bits, synchronize
from weft.errors import BadExpertId, InvalidArgument
from weft.hosts.buffers import RailViews
from weft.lowlatency.config import LowLatencyConfig, LowLatencySpec

TOKENS = 8
WAYS = {
    "fp8": Mode(),
    "plain": Mode(quantize=None),
    "sender": Mode(reduce="sender", combine_dtype="fp8"),
    "by column, of 32": Mode(scale="fp32_col", group_size=32),
    "powers of two": Mode(scale="ue8m0", reduce="sender"),
    "halves": Mode(more={"split_phase": True}),
}


def rounds(group: weft.Group, tokens: tuple[int, ...]) -> None:
    """Play every mode, and combine two live results, each with its own ids."""
    for number, (name, mode) in enumerate(WAYS.items()):
        case = Round(tokens=tokens, hidden=256, add=True, router="holes")
        with mode.make(group, case, TOKENS) as low:
            for seed in range(2):
                each = case.next(seed=10 * number + seed)
                play(low, mode, each, poison=False, split_phase=name == "halves")
            ins = [case.turned(seed).inputs_of(group.rank, group.device) for seed in (98, 99)]
            alive = [low.dispatch(*each[:3]) for each in ins]
            for inputs, rows in zip(ins, alive, strict=True):
                _, ids, weights, add = inputs
                out = low.combine(expert_results(low, rows), ids, weights, rows.handle, add=add)
                synchronize(group.device)
                assert torch.equal(bits(out), bits(expected_out(low, mode, case, inputs)))
            low.check()


@campaign
@across(2)
def test_hosts_match_the_reference(group: weft.Group) -> None:
    rounds(group, (5, 0, 8, 2))


SMALL = Round(tokens=(2, 2, 2, 2), top_k=2, experts=4, hidden=128)


@across(2)
def test_bad_weights_and_ids_are_refused(group: weft.Group) -> None:
    x, ids, weights, _ = SMALL.inputs_of(group.rank, group.device)
    with weft.LowLatencyAllToAll(group, **SMALL.sizes(2), reduce="receiver") as low:
        got = low.dispatch(x, ids)
        y = torch.zeros((*got.x.shape[:2], 128), dtype=torch.bfloat16)
        with pytest.raises(InvalidArgument, match="pass the same tensor to both"):
            low.combine(y, ids, weights, got.handle)
        low.combine(y, ids, None, got.handle)
        wrong = torch.tensor([[0, 9], [1, 1]]) if group.rank == 3 else ids
        got = low.dispatch(x, wrong)
        low.combine(y, wrong, None, got.handle)
        if group.rank == 3:
            with pytest.raises(BadExpertId, match=r"topk_ids\[0, 1\] is 9; .*2 reports"):
                low.check()
        low.check()
        for lie in (4, -9):

            def tell(slots: RailViews, own: int, lie: int = lie) -> None:
                slots.ids[own, 1, 0] = lie

            with tamper_with_rail(low, tell) if group.rank == 3 else contextlib.nullcontext():
                got = low.dispatch(x, ids, weights)
            low.combine(y, ids, weights, got.handle)
            if group.rank == 1:
                text = rf"^rank 3: topk_ids\[1, 0\] is {lie} \(reported by rank 1\); "
                with pytest.raises(BadExpertId, match=text):
                    low.check()
            low.check()


# A row is 132 vectors of 16 bytes: two pieces of a warp, and four vectors of the third.
LONG = Round(tokens=(5, 0, 8, 2), hidden=2048, router="holes")


def emulated(group: weft.Group, library: str) -> None:
    mode = Mode(more={"timeout": 600.0})
    with mode.make(group, LONG, TOKENS) as low:
        low._local.kernels = EmulatedLow(Path(library), low.config.shape)
        for seed in range(2):
            play(low, mode, LONG.next(seed=seed), poison=False)


@campaign
def test_kernels_forward_quantised_rows_as_they_came(ranks):
    spec = LowLatencySpec(ranks=2, **LONG.sizes(TOKENS), reduce=Mode().reduce)
    config = LowLatencyConfig.from_spec(spec, hosts=((0, 1), (2, 3)))
    ranks(4, "cpu")(on_hosts, 2, emulated, str(compile_low(config.shape)))
