# SPDX-License-Identifier: Apache-2.0
"""Routing: expert ids and weights for dispatch, from logits or from the caller's top-k."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch

from weft.arguments import (
    check_bools,
    check_choice,
    check_float,
    check_instance,
    check_int,
    set_fields,
)
from weft.errors import InvalidArgument
from weft.fields import max_value
from weft.moe.routing.kernels import (
    DTYPES,
    KERNEL_MAX_EXPERTS,
    KERNEL_MAX_TOP_K,
    NORMALIZE,
    NORMALIZE_THREADS,
    ROUTE,
    ROUTE_THREADS,
    TOKENS_PER_CTA,
    NormalizeArgs,
    RouteArgs,
)
from weft.placement import MAX_EP_SIZE, NO_SUCH_EXPERT
from weft.runtime.ambient import disable_autocast
from weft.runtime.check import check_dense, check_gradient, check_tensor, raise_not_tensor
from weft.shape import Shape

SUM_EPSILON = 1e-20  # avoids 0 / 0 if all scores are 0; too small to change any other sum
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64)
INT64 = -(1 << 63), (1 << 63) - 1

Score = Literal["softmax", "sigmoid", "sqrtsoftplus", "softmax-chosen"]
Weigh = Literal["output", "input"]
GROUP_BESTS = (1, 2)
MAX_EXPERTS = max_value(Shape, "experts")


class Routed(NamedTuple):
    """Experts and weights of a batch.

    Attributes:
        ids: int32 `[tokens, top_k]`, -1 for padding.
        weights: float32 `[tokens, top_k]`.
    """

    ids: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True, slots=True)
class Routing:
    """Rule by which a layer chooses and weights experts.

    Attributes:
        num_experts: Number of experts.
        top_k: Experts per token.
        score: "softmax", "sigmoid" or "sqrtsoftplus" (sqrt(log(1 + exp(logit)))) of all logits, or
            "softmax-chosen": softmax over the chosen logits only.
        renormalise: Divide the chosen scores by their sum.
        correction: Add a bias `[num_experts]` to the scores for the choice, not for the weights.
        groups: Number of equal contiguous groups of experts.
        top_groups: Number of best groups from which experts are chosen.
        group_best: Number of best experts, 1 or 2, whose sum is the score of a group.
        scale: Factor of every weight, applied last.
        weigh: "output": weights multiply the experts' results; "input": they multiply their inputs,
            which requires top_k 1.

    Raises:
        InvalidArgument: a field is invalid. The text names it and its valid values.
    """

    num_experts: int
    top_k: int
    score: Score = "softmax"
    renormalise: bool = True
    correction: bool = False
    groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    scale: float = 1.0
    weigh: Weigh = "output"

    def __post_init__(self) -> None:
        """Check and normalise the fields."""
        experts = check_int("num_experts", self.num_experts, 1, MAX_EXPERTS)
        groups = check_int("groups", self.groups, 1, MAX_EXPERTS)
        top_k = check_int("top_k", self.top_k, 1, MAX_EXPERTS)
        top_groups = check_int("top_groups", self.top_groups, 1, groups)
        set_fields(self, num_experts=experts, groups=groups, top_k=top_k, top_groups=top_groups)
        if experts % groups:
            raise InvalidArgument(
                f"groups is {groups} for {experts} experts; it must divide them evenly"
            )
        eligible = experts // groups * self.top_groups
        if self.top_k > eligible:
            raise InvalidArgument(
                f"top_k is {self.top_k}; it must be in 1..{eligible}, the experts of "
                f"{self.top_groups} of {groups} groups"
            )
        self._check_rule(experts // groups)

    def to_cpp(self) -> str:
        """Return the C++ initialiser that specialises the kernel."""
        renormalise, correction = str(self.renormalise).lower(), str(self.correction).lower()
        return (
            f"weft::Routing{{.experts = {self.num_experts}, .top_k = {self.top_k}, "
            f".score = weft::Score::{self.score.replace('-', '_')}, "
            f".renormalise = {renormalise}, .correction = {correction}, "
            f".groups = {self.groups}, .top_groups = {self.top_groups}, "
            f".group_best = {self.group_best}}}"
        )

    def _check_rule(self, group_size: int) -> None:
        set_fields(
            self,
            score=check_choice("score", self.score, get_args(Score)),
            weigh=check_choice("weigh", self.weigh, get_args(Weigh)),
            group_best=check_choice("group_best", self.group_best, GROUP_BESTS),
            scale=check_float("scale", self.scale, above=0.0),
        )
        check_bools(renormalise=self.renormalise, correction=self.correction)
        if self.groups > 1 and self.group_best > group_size:
            raise InvalidArgument(
                f"group_best is {self.group_best}, but a group has {group_size} expert(s)"
            )
        if self.score == "softmax-chosen" and (self.correction or self.groups > 1):
            raise InvalidArgument(
                "score 'softmax-chosen' computes no scores before the choice: use it without "
                f"correction and groups; correction is {self.correction}, groups {self.groups}"
            )
        if self.weigh == "input" and self.top_k != 1:
            raise InvalidArgument(
                f"weigh 'input' with top_k {self.top_k}: a token is sent once, so it can be "
                "multiplied by only one weight; use top_k 1 or weigh 'output'"
            )


@disable_autocast
def route(
    routing: Routing,
    logits: torch.Tensor,
    *,
    correction: torch.Tensor | None = None,
    num_tokens: torch.Tensor | None = None,
) -> Routed:
    """Return each token's experts, best first, and their weights.

        choice  = logits, or score(logits) + correction with a correction or groups
        ids     = the top_k of choice, with -inf outside the top_groups groups
        weights = score[ids] / (sum of score[ids] + 1e-20) * scale

    Ties go to the lowest expert id and to the lowest group. torch.topk may break ties differently:
    to keep your own router's choice, pass its topk_ids. A NaN logit counts as larger than any
    number, so its expert is chosen with weight NaN. Only that token's output becomes NaN.

    The call does not synchronize and may be captured. On a GPU it is one kernel without a gradient.
    A rule's first call loads that kernel and must not be captured.

    Args:
        routing: The rule.
        logits: float32, bfloat16 or float16 `[tokens, num_experts]`; all arithmetic is in float32.
        correction: float32 `[num_experts]`, exactly if the rule has one.
        num_tokens: int32 `[1]` on the device: rows from there on are padding, with ids -1 and
            weights 0.

    Raises:
        InvalidArgument: an argument is invalid.
        OutOfOrder: a rule's first call is being captured.
    """
    check_route(routing, logits, correction, num_tokens)
    return run_route(routing, logits, correction, num_tokens)


def run_route(
    routing: Routing,
    logits: torch.Tensor,
    correction: torch.Tensor | None,
    num_tokens: torch.Tensor | None,
) -> Routed:
    """Run `route` on checked tensors."""
    if not _has_kernel(routing, logits):
        return route_in_torch(routing, logits, correction, num_tokens)
    size, device = (len(logits), routing.top_k), logits.device
    ids = torch.empty(size, dtype=torch.int32, device=device)
    weights = torch.empty(size, dtype=torch.float32, device=device)
    args = build_route_args(logits, correction, num_tokens, routing.scale, ids, weights)
    ROUTE.enqueue(
        _format_cpp(routing), args, device, -(-args.tokens // TOKENS_PER_CTA), ROUTE_THREADS
    )
    return Routed(ids, weights)


@functools.lru_cache(maxsize=256)
def _format_cpp(routing: Routing) -> str:
    return routing.to_cpp()


def build_route_args(
    logits: torch.Tensor,
    correction: torch.Tensor | None,
    num_tokens: torch.Tensor | None,
    scale: float,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> RouteArgs:
    """Return the kernel's arguments for checked tensors."""
    return RouteArgs(
        logits=logits.data_ptr(),
        correction=0 if correction is None else correction.data_ptr(),
        num_tokens=0 if num_tokens is None else num_tokens.data_ptr(),
        ids=ids.data_ptr(),
        weights=weights.data_ptr(),
        row_stride=logits.stride(0),
        column_stride=logits.stride(1),
        tokens=len(logits),
        dtype=DTYPES[logits.dtype],
        scale=scale,
    )


def route_in_torch(
    routing: Routing,
    logits: torch.Tensor,
    correction: torch.Tensor | None = None,
    num_tokens: torch.Tensor | None = None,
) -> Routed:
    """Run `route` on checked tensors with torch operations: the specification of the kernel."""
    logits = logits.float()
    scores = _compute_scores(routing, logits)
    # Scores are monotone in the logits but have more ties. Adding 0 turns -0 into +0, because a
    # sort orders the two.
    choice = scores if routing.correction or routing.groups > 1 else logits + 0.0
    if correction is not None:
        choice = choice + correction
    if routing.groups > 1:
        choice = _mask_groups(routing, choice)
    indices = choice.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    weights = _compute_weights(routing, scores, indices)
    ids = indices.to(torch.int32, memory_format=torch.contiguous_format)
    if num_tokens is not None:
        rows = torch.arange(len(ids), dtype=torch.int64, device=ids.device)
        padding = (rows >= num_tokens)[:, None]
        ids, weights = ids.masked_fill(padding, -1), weights.masked_fill(padding, 0.0)
    return Routed(ids, weights.contiguous())


@disable_autocast
def compute_topk_weights(routing: Routing, logits: torch.Tensor, topk_ids: torch.Tensor) -> Routed:
    """Return routing weights for the given expert ids, and the ids as dispatch takes them.

    DeepSeek-V4's first layers use it with `topk_ids = tid2eid[input_ids]`. The call uses torch
    operations only and does not synchronize.

    Args:
        routing: The rule.
        logits: `[tokens, num_experts]`, as for `route`.
        topk_ids: int32 or int64 `[tokens, top_k]`, -1 for none. The weight of -1 and of invalid ids
            is 0. Invalid ids stay invalid, so that dispatch rejects and reports them.

    Raises:
        InvalidArgument: an argument is invalid.
    """
    check_logits(routing, logits)
    size, device = (len(logits), routing.top_k), logits.device
    check_tensor("topk_ids", topk_ids, shape=size, dtypes=INTEGERS, device=device, aligned=1)
    ids, experts = topk_ids.long(), routing.num_experts
    invalid = (ids < 0) | (ids >= experts)
    padding = -math.inf if routing.score == "softmax-chosen" else 0.0
    scores = torch.nn.functional.pad(
        _compute_scores(routing, logits.float()), (0, 1), value=padding
    )
    weights = _compute_weights(routing, scores, ids.masked_fill(invalid, experts))
    ids = torch.where(invalid & (ids != -1), NO_SUCH_EXPERT, ids)
    return Routed(ids.int(), weights.masked_fill(invalid, 0.0))


def _has_kernel(routing: Routing, logits: torch.Tensor) -> bool:
    """Whether the kernel supports this call. Compiled graphs use the torch operations instead."""
    return (
        logits.device.type == "cuda"
        and routing.num_experts <= KERNEL_MAX_EXPERTS
        and routing.top_k <= KERNEL_MAX_TOP_K
        and not torch.compiler.is_dynamo_compiling()
    )


@disable_autocast
def router_logits(
    x: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return float32 logits `[tokens, num_experts]`: `x @ gate.T + bias`.

    Float32 avoids ties, which are frequent in bfloat16 and would make the choice depend on
    rounding.

    Args:
        x: `[tokens, hidden]`.
        gate: `[num_experts, hidden]`. Keep it in float32 to avoid a conversion in every call.
        bias: `[num_experts]`, or None.

    Raises:
        InvalidArgument: an argument is invalid.
    """
    for name, tensor in (("x", x), ("gate", gate), ("bias", bias)):
        if not isinstance(tensor, torch.Tensor) and not (tensor is None and name == "bias"):
            raise_not_tensor(name, tensor)
        if tensor is not None:
            check_dense(name, tensor)
            check_gradient(name, tensor)
    if x.dim() != 2 or gate.dim() != 2 or x.shape[1] != gate.shape[1] or x.device != gate.device:
        raise InvalidArgument(
            f"x is {list(x.shape)} on {x.device} and gate {list(gate.shape)} on {gate.device}; "
            "they must be [tokens, hidden] and [num_experts, hidden] on one device"
        )
    if bias is not None and (tuple(bias.shape) != (len(gate),) or bias.device != x.device):
        raise InvalidArgument(
            f"bias is {list(bias.shape)} on {bias.device}; it must be [{len(gate)}] on {x.device}"
        )
    bias = None if bias is None else bias.float()
    return torch.nn.functional.linear(x.float(), gate.float(), bias)


def _compute_scores(routing: Routing, logits: torch.Tensor) -> torch.Tensor:
    match routing.score:
        case "softmax":
            return logits.softmax(dim=-1)
        case "sigmoid":
            return _map_tokens(torch.sigmoid, logits)
        case "sqrtsoftplus":
            return _map_tokens(torch.nn.functional.softplus, logits).sqrt()
        case "softmax-chosen":
            return logits


def _map_tokens(
    function: Callable[[torch.Tensor], torch.Tensor], logits: torch.Tensor
) -> torch.Tensor:
    """Apply an elementwise function so that a token's bits do not depend on other tokens.

    On CPUs, torch rounds the last elements of a tensor differently from the others. Compiled graphs
    have loops of their own.
    """
    if logits.device.type != "cpu" or torch.compiler.is_dynamo_compiling() or not len(logits):
        return function(logits)
    return torch.stack([function(token) for token in logits])


def _compute_weights(routing: Routing, scores: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    weights = scores.gather(-1, indices)
    if routing.score == "softmax-chosen":
        weights = weights.softmax(dim=-1)
    elif routing.renormalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + SUM_EPSILON)
    return weights if routing.scale == 1.0 else weights * routing.scale


def _mask_groups(routing: Routing, choice: torch.Tensor) -> torch.Tensor:
    """Return `choice` with -inf for the experts outside the best groups."""
    sizes = (len(choice), routing.groups, routing.num_experts // routing.groups)
    by_group = choice.reshape(sizes)
    best = by_group.topk(routing.group_best, dim=-1).values.sum(dim=-1)
    order = best.sort(dim=-1, descending=True, stable=True).indices
    # Within the best groups, experts with a correction of -inf rank last, but still above all
    # experts of other groups.
    lowest = torch.finfo(torch.float32).min
    by_group = torch.where(by_group == -torch.inf, lowest, by_group)
    masked = torch.ones_like(best, dtype=torch.bool)
    masked.scatter_(-1, order[:, : routing.top_groups], False)
    return by_group.masked_fill(masked.unsqueeze(-1), -torch.inf).view(choice.shape)


def check_logits(routing: Routing, logits: torch.Tensor) -> None:
    """Raise InvalidArgument if the logits do not fit the routing."""
    experts = check_instance("routing", routing, Routing).num_experts
    if not isinstance(logits, torch.Tensor):
        raise_not_tensor("logits", logits)
    if logits.is_nested or logits.layout is not torch.strided:
        raise InvalidArgument("logits are sparse or nested; pass logits.to_dense()")
    if logits.dim() != 2 or logits.shape[1] != experts or logits.dtype not in FLOATS:
        raise InvalidArgument(
            f"logits are {list(logits.shape)} {logits.dtype}; they must be [tokens, {experts}] in "
            "float32, bfloat16 or float16"
        )
    check_gradient("logits", logits)


def check_route(
    routing: Routing,
    logits: torch.Tensor,
    correction: torch.Tensor | None,
    num_tokens: torch.Tensor | None,
) -> None:
    """Raise InvalidArgument if an argument of `route` is invalid."""
    check_logits(routing, logits)
    experts = routing.num_experts
    if correction is not None and not isinstance(correction, torch.Tensor):
        raise_not_tensor("correction", correction)
    if (correction is None) == routing.correction:
        if correction is None:
            raise InvalidArgument(
                "correction is None, but this routing has correction=True: pass the "
                f"router's float32 [{experts}] (e_score_correction_bias of a checkpoint)"
            )
        raise InvalidArgument(
            f"correction is a tensor {list(correction.shape)}, but this routing has "
            "correction=False: leave it out, or use Routing(..., correction=True)"
        )
    if correction is not None:
        check_tensor(
            "correction",
            correction,
            shape=(experts,),
            dtypes=(torch.float32,),
            device=logits.device,
            kept=True,
            aligned=1,
        )
    _check_count(num_tokens, logits.device)


@disable_autocast
def normalize_topk(
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    padding_id: int = -1,
    skip_zero_weights: bool = False,
    num_tokens: torch.Tensor | None = None,
    replicas: torch.Tensor | None = None,
    rank: int = 0,
) -> Routed:
    """Return ids and weights in the form for dispatch: int32 with -1 for no expert, and float32.

    Invalid ids stay invalid, so that dispatch rejects and reports them. On a GPU the call is at
    most one kernel. It does not synchronize and may be captured, except for the first call on a
    device, which loads the kernel.

    Args:
        topk_ids: int32 or int64 `[tokens, top_k]`.
        topk_weights: float32, bfloat16 or float16 `[tokens, top_k]`.
        padding_id: An id besides -1 that means no expert; some engines use num_experts.
        skip_zero_weights: Treat entries of weight 0 as no expert, so that padding is not sent.
        num_tokens: int32 `[1]` on the device: rows from there on are padding.
        replicas: int32 `[num_experts, 1 + max_replicas]` on the device: `counts` and `physical` of
            `Replicas.table` side by side. It maps logical ids to physical ones: token t of this
            rank takes replica `(t + rank) % count`. The kernel reads the table, so it may change
            between replays of a graph.
        rank: This rank, for the choice of replicas.

    Raises:
        InvalidArgument: an argument is invalid.
        OutOfOrder: the first call on a device is being captured.
    """
    check_bools(skip_zero_weights=skip_zero_weights)
    padding_id = check_int("padding_id", padding_id, *INT64)
    rank = check_int("rank", rank, 0, MAX_EP_SIZE - 1)
    check_topk(topk_ids, topk_weights, num_tokens)
    if replicas is not None:
        size, dtypes, device = (None, None), (torch.int32,), topk_ids.device
        check_tensor("replicas", replicas, shape=size, dtypes=dtypes, device=device, aligned=1)
    return run_normalize_topk(
        topk_ids, topk_weights, num_tokens, replicas, rank, padding_id, skip_zero_weights
    )


def run_normalize_topk(
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    num_tokens: torch.Tensor | None,
    replicas: torch.Tensor | None,
    rank: int,
    padding_id: int = -1,
    skip_zero_weights: bool = False,
) -> Routed:
    """Run `normalize_topk` on checked arguments."""
    device = topk_ids.device
    unchanged = (
        padding_id == -1
        and not skip_zero_weights
        and num_tokens is None
        and replicas is None
        and topk_weights.dtype == torch.float32
    )
    if unchanged:
        return Routed(topk_ids, topk_weights)
    if device.type != "cuda":  # the specification of the kernel
        ids, weights = topk_ids.long(), topk_weights.float()
        token = torch.arange(len(ids), dtype=torch.int64, device=ids.device)[:, None]
        is_padding = (ids == -1) | (ids == padding_id)
        if skip_zero_weights:
            is_padding |= weights == 0
        if num_tokens is not None:
            is_padding |= token >= num_tokens
        if replicas is None:
            valid = ids == ids.int()
        else:
            valid = (ids >= 0) & (ids < len(replicas))
            row = torch.where(valid, ids, 0)
            column = 1 + (token + rank) % replicas[row, 0]
            ids = replicas[row, column].long()
        ids = torch.where(is_padding, -1, torch.where(valid, ids, NO_SUCH_EXPERT))
        return Routed(ids.int(), torch.where(is_padding, 0.0, weights))
    ids = torch.empty(topk_ids.shape, dtype=torch.int32, device=device)
    weights = torch.empty(topk_ids.shape, dtype=torch.float32, device=device)
    args = NormalizeArgs(
        ids=topk_ids.data_ptr(),
        weights=topk_weights.data_ptr(),
        num_tokens=0 if num_tokens is None else num_tokens.data_ptr(),
        replicas=0 if replicas is None else replicas.data_ptr(),
        out_ids=ids.data_ptr(),
        out_weights=weights.data_ptr(),
        padding_id=padding_id,
        entries=topk_ids.numel(),
        top_k=max(topk_ids.shape[1], 1),
        ids_bytes=topk_ids.itemsize,
        dtype=DTYPES[topk_weights.dtype],
        experts=0 if replicas is None else len(replicas),
        width=0 if replicas is None else replicas.shape[1],
        rank=rank,
        skips_zeros=skip_zero_weights,
    )
    ctas = -(-args.entries // NORMALIZE_THREADS)
    NORMALIZE.enqueue("", args, device, ctas, NORMALIZE_THREADS)
    return Routed(ids, weights)


def check_topk(
    topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_tokens: torch.Tensor | None
) -> None:
    """Raise InvalidArgument if the caller's ids and weights are invalid."""
    device = topk_ids.device if isinstance(topk_ids, torch.Tensor) else torch.device("cpu")
    size = (None, None)
    check_tensor("topk_ids", topk_ids, shape=size, dtypes=INTEGERS, device=device, aligned=1)
    name, shape = "topk_weights", topk_ids.shape
    check_tensor(name, topk_weights, shape=shape, dtypes=FLOATS, device=device, aligned=1)
    if topk_ids.numel() >= 1 << 31:
        raise InvalidArgument(f"topk_ids has {topk_ids.numel()} entries; pass fewer than 2^31")
    _check_count(num_tokens, device)


def _check_count(num_tokens: torch.Tensor | None, device: torch.device) -> None:
    if num_tokens is not None:
        name, dtypes = "num_tokens", (torch.int32,)
        check_tensor(name, num_tokens, shape=(1,), dtypes=dtypes, device=device, aligned=1)
