# SPDX-License-Identifier: Apache-2.0
"""Call each operator once: AllToAll, ExpertGroups with grouped_gemm, LowLatencyAllToAll, AllReduce.

    python examples/operators.py [--ranks 2] [--device cpu]

Every expert is a gated MLP. All ways of running the experts give the same output, which is
compared with plain torch.
"""

import argparse

import torch

import weft
from weft.gemm import Gated, GatedQuant, grouped_gemm
from weft.moe import ExpertWeights

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, MAX_TOKENS = 512, 256, 16, 4, 8
SIZES = {"max_tokens": MAX_TOKENS, "top_k": TOP_K, "num_experts": EXPERTS, "hidden": HIDDEN}


def mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Return `down(silu(gate(x)) * up(x))` in float32."""
    gate, up = (x.float() @ gate_up.float().T).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up) @ down.float().T


def make_experts(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gate_up `[experts, 2 * intermediate, hidden]` and down, equal on all ranks."""
    random = torch.Generator().manual_seed(1)
    gate_up = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=random) / HIDDEN**0.5
    down = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=random) / INTERMEDIATE**0.5
    return gate_up.bfloat16().to(device), down.bfloat16().to(device)


def run_alltoall(group, x, topk_ids, topk_weights, gate_up, down):
    # --8<-- [start:alltoall]
    with weft.AllToAll(group, **SIZES) as a2a:
        received = a2a.dispatch(x, topk_ids, topk_weights)  # .x: [ranks, max_tokens, hidden]
        y = torch.zeros(received.x.shape, device=x.device)
        for e in range(a2a.num_local_experts):  # the weighted sum over this rank's experts
            w = torch.where(received.ids == e, received.weights, 0).sum(-1, keepdim=True)
            y += w * mlp(received.x, gate_up[e], down[e])
        out = a2a.combine(y.bfloat16())  # [tokens, hidden]
        a2a.check()
    # --8<-- [end:alltoall]
    return out


def run_groups(group, x, topk_ids, topk_weights, gate_up, down):
    # --8<-- [start:groups]
    with weft.AllToAll(group, **SIZES) as a2a:
        groups = weft.ExpertGroups(a2a, align=16)
        g = groups.gather(a2a.dispatch(x, topk_ids, topk_weights))  # rows, expert by expert
        h = grouped_gemm(g.x, gate_up, counts=g.counts, offsets=g.offsets, epilogue=Gated())
        y = grouped_gemm(h, down, counts=g.counts, offsets=g.offsets)
        groups.scatter(y)  # weighted sums into a2a.output()
        out = a2a.combine()
        a2a.check()
        groups.close()
    # --8<-- [end:groups]
    return out


def run_groups_fp8(group, x, topk_ids, topk_weights, gate_up, down):
    experts = ExpertWeights(gate_up, down).to_fp8()
    # --8<-- [start:fp8]
    with weft.AllToAll(group, **SIZES, quantize="fp8") as a2a:  # rows travel as FP8
        groups = weft.ExpertGroups(a2a, align=16)
        g = groups.gather(a2a.dispatch(x, topk_ids, topk_weights))
        rows, scales = g.rows
        at = {"counts": g.counts, "offsets": g.offsets}
        up = {"a_scale": scales, "b_scale": experts.gate_up_scale, "epilogue": GatedQuant()}
        h, h_scales = grouped_gemm(rows, experts.gate_up, **up, **at)
        y = grouped_gemm(h, experts.down, a_scale=h_scales, b_scale=experts.down_scale, **at)
        groups.scatter(y)
        out = a2a.combine()
        a2a.check()
        groups.close()
    # --8<-- [end:fp8]
    return out


def run_low_latency(group, x, topk_ids, topk_weights, gate_up, down):
    # --8<-- [start:lowlatency]
    with weft.LowLatencyAllToAll(group, **SIZES) as a2a:
        rows = a2a.dispatch(x, topk_ids, topk_weights)  # FP8 [local_experts, R, hidden]
        tokens = weft.reference.dequantize(rows.x, rows.scales)
        y = [mlp(tokens[e], gate_up[e], down[e]) for e in range(a2a.num_local_experts)]
        out = a2a.combine(torch.stack(y).bfloat16(), topk_ids, topk_weights, rows.handle)
        a2a.check()
    # --8<-- [end:lowlatency]
    return out


def run_allreduce(group, device):
    part = torch.ones(4, HIDDEN, device=device).bfloat16()
    residual, weight = torch.zeros_like(part), torch.ones(HIDDEN, device=device)
    # --8<-- [start:allreduce]
    with weft.AllReduce(group, max_tokens=MAX_TOKENS, hidden=HIDDEN) as reduce:
        result = reduce.fused(part, residual=residual, weight=weight)  # part: this rank's sums
        normed, residual = result.norm, result.residual  # the same bits on all ranks
        reduce.check()
    # --8<-- [end:allreduce]
    return normed, residual


def rank(group):
    """Run on every rank; return the largest error of each operator."""
    torch.manual_seed(group.rank)
    x = torch.randn(3 + group.rank, HIDDEN, device=group.device).bfloat16()
    weights, ids = torch.rand(len(x), EXPERTS, device=group.device).softmax(1).topk(TOP_K)
    gate_up, down = make_experts(group.device)
    expected = weft.reference.moe_layer(x, ids, weights, gate_up, down)
    local = slice(group.rank * EXPERTS // group.size, (group.rank + 1) * EXPERTS // group.size)
    errors = []
    for run in (run_alltoall, run_groups, run_groups_fp8, run_low_latency):
        out = run(group, x, ids, weights, gate_up[local], down[local])
        errors.append(float((out.float() - expected).abs().max() / expected.abs().max()))
    normed, residual = run_allreduce(group, group.device)
    assert torch.equal(residual, torch.full_like(residual, group.size))
    assert torch.equal(normed, torch.ones_like(normed))
    assert errors[0] < 0.01, errors
    assert errors[1] < 0.02, errors
    assert errors[2] < 0.1, errors  # FP8 rows, weights and intermediate results
    assert errors[3] < 0.1, errors  # FP8 on the way to the experts
    return [round(error, 4) for error in errors]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    for errors in weft.launch(rank, ranks=options.ranks, device=options.device):
        print("relative errors of AllToAll, groups, groups in FP8, low latency:", errors)
