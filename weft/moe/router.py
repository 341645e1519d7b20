"""Routers: from logits to expert ids and weights."""

from __future__ import annotations

import torch

from weft.errors import InvalidArgument


def softmax_top_k(
    logits: torch.Tensor, top_k: int, *, renormalise: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `top_k` most probable experts of each token and their weights.

    logits: `[tokens, num_experts]`, any float dtype; the softmax is taken in fp32.
    renormalise: divide the chosen probabilities by their sum, so that each row's weights add to 1.

    Returns ids int32 `[tokens, top_k]`, most probable first, and weights float32 likewise.

        p = softmax(logits);  ids = top_k(p);  weights = p[ids] / sum(p[ids])

    Raises InvalidArgument when logits are not 2-D or hold fewer experts than `top_k`.
    """
    if logits.dim() != 2 or not 1 <= top_k <= logits.shape[1]:
        raise InvalidArgument(
            f"logits have shape {list(logits.shape)} and top_k is {top_k}; "
            "logits must be [tokens, num_experts] with num_experts >= top_k >= 1"
        )
    weights, ids = logits.float().softmax(dim=-1).topk(top_k, dim=-1)
    if renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return ids.int(), weights.contiguous()
