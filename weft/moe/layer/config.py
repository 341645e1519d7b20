# SPDX-License-Identifier: Apache-2.0
"""Options of an MoE layer, their checks, and the execution plan that follows from them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch

from weft.alltoall.config import COMBINE_DTYPES, SCALES
from weft.arguments import check_bools, check_choice, check_instance, check_int
from weft.errors import InvalidArgument
from weft.fields import max_value
from weft.gemm import WgmmaPlan
from weft.gemm.config import FP8, fastest_plan
from weft.gemm.triton_launch import import_triton, is_triton_installed
from weft.grouping.config import MAX_ROWS
from weft.lowlatency.config import MAX_TOKENS
from weft.moe.layer.choice import AUTO, MODES, OVERLAPS
from weft.moe.models import MoEConfig
from weft.moe.replicas.placement import Replicas
from weft.runtime.options import RunOptions
from weft.shape import DTYPE_NAMES, FP8_BLOCK, Shape

GEMMS = (AUTO, "grouped", "torch")
MISSING = ("error", "drop")
MAX_SMS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOptions(RunOptions):
    """The options of `MoE`."""

    max_tokens: int
    mode: str = AUTO
    overlap: str = AUTO
    gemm: str = AUTO
    max_rows: int | None = None
    expert_map: Sequence[int] | torch.Tensor | None = None
    replicas: Replicas | None = None
    missing: str = "error"
    fp8: bool = False
    quantize: str | None = None
    combine_dtype: str | None = None
    batch_invariant: bool = False

    def check_for(self, config: MoEConfig, hosts: int) -> None:
        """Raise InvalidArgument for options that are invalid for this config and host count."""
        check_choice("dtype", config.dtype, DTYPE_NAMES)
        check_choice("mode", self.mode, (AUTO, *MODES))
        check_choice("overlap", self.overlap, (AUTO, *OVERLAPS))
        check_choice("gemm", self.gemm, GEMMS)
        check_choice("missing", self.missing, MISSING)
        check_choice("quantize", self.quantize, (None, *SCALES))
        check_choice("combine_dtype", self.combine_dtype, COMBINE_DTYPES)
        check_int("max_tokens", self.max_tokens, 1, max_value(Shape, "tokens"))
        if self.max_rows is not None:
            check_int("max_rows", self.max_rows, 1, MAX_ROWS)
        if self.num_sms is not None:
            check_int("num_sms", self.num_sms, 1, MAX_SMS)
        self.check()
        check_bools(fp8=self.fp8, batch_invariant=self.batch_invariant)
        if self.batch_invariant:
            self._check_batch_invariant(hosts)
        if self.replicas is not None:
            self._check_replicas(self.replicas, config.routing.num_experts, hosts)

    def _check_batch_invariant(self, hosts: int) -> None:
        if hosts > 1:
            raise InvalidArgument(
                f"batch_invariant is True in a group of {hosts} hosts, but each host rounds its "
                "own sum of a token's rows: use ranks of one host, or leave batch_invariant out"
            )
        if self.combine_dtype is not None:
            raise InvalidArgument(
                f"batch_invariant is True with combine_dtype={self.combine_dtype!r}, which rounds "
                "sums that depend on the placement of experts: leave one of them out"
            )
        if self.gemm == "torch":
            raise InvalidArgument(
                "batch_invariant is True with gemm='torch', but torch chooses kernels by the "
                "number of rows: use gemm='grouped', or leave batch_invariant out"
            )

    def _check_replicas(self, replicas: Replicas, experts: int, hosts: int) -> None:
        check_instance("replicas", replicas, Replicas, "weft.moe.balance returns one")
        if self.expert_map is not None:
            raise InvalidArgument(
                "expert_map and replicas exclude each other, because replicas place every expert: "
                "leave expert_map out"
            )
        if replicas.num_experts != experts:
            raise InvalidArgument(
                f"replicas are for {replicas.num_experts} experts, but the config has {experts}"
            )
        if hosts > 1:
            raise InvalidArgument(
                f"replicas were passed for a group of {hosts} hosts, but weft does not choose "
                "replicas by host yet: leave them out, or pass expert_map"
            )

    def count_physical_experts(self, config: MoEConfig) -> int:
        """Return the number of physical experts over all ranks, the range of dispatch's ids."""
        replicas = self.replicas
        return config.routing.num_experts if replicas is None else len(replicas.logical)

    def get_run_options(self) -> dict[str, Any]:
        """Return the options that the layer passes on to its all-to-all unchanged."""
        return {option.name: getattr(self, option.name) for option in fields(RunOptions)}

    def manifest(self, config: MoEConfig) -> dict[str, str]:
        """Return the values that must be equal on all ranks."""
        compared_fields = ("max_tokens", "mode", "overlap", "missing", "fp8", "batch_invariant")
        rules = asdict(config) | {name: getattr(self, name) for name in compared_fields}
        # Each layer of a workspace has its own placement, and relocate may change it.
        rules["replicas"] = None if self.replicas is None else len(self.replicas.logical)
        return {name: str(value) for name, value in rules.items()}


@dataclass(frozen=True, slots=True)
class MemoryQuery(LayerOptions):
    """Arguments of `MoE.memory_bytes`."""

    config: MoEConfig
    ranks: int = field(kw_only=True)
    device: torch.device | str = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Execution plan of a layer on one rank. Only the GEMM may differ between ranks.

    Attributes:
        mode: "throughput" or "low_latency".
        overlap: "none", "shared_expert" or "gemm_push".
        gemm: "grouped" or "torch".
        quantize: Format in which dispatch sends rows, or None for the layer's dtype.
    """

    mode: str
    overlap: str
    gemm: str
    quantize: str | None

    @property
    def gemm_push(self) -> bool:
        """Whether the down projection stores its rows at the tokens' owners."""
        return self.overlap == "gemm_push"


def build_plans(
    config: MoEConfig, options: LayerOptions, device: torch.device, *, hosts: int = 1
) -> dict[tuple[str, str], LayerPlan]:
    """Return the plans that this device supports, by mode and overlap.

    With an explicit overlap, the other overlaps of its mode are included, so that `LayerChoice` can
    report what "auto" would select.

    Raises:
        InvalidArgument: no plan supports the requested mode and overlap.
    """
    options.check_for(check_instance("config", config, MoEConfig), hosts)
    modes = MODES if options.mode == AUTO else (options.mode,)
    plans: dict[tuple[str, str], LayerPlan] = {}
    errors: dict[tuple[str, str], str] = {}
    for mode, overlap in itertools.product(modes, OVERLAPS):
        if overlap == "shared_expert" and not config.shared and options.overlap != overlap:
            continue  # nothing to overlap
        try:
            plan = build_plan(replace(options, mode=mode, overlap=overlap), config, device)
        except InvalidArgument as error:
            errors[mode, overlap] = str(error)
        else:
            plans[mode, overlap] = plan
    if options.overlap != AUTO:
        supported_modes = {mode for mode, overlap in plans if overlap == options.overlap}
        plans = {key: plan for key, plan in plans.items() if key[0] in supported_modes}
    if not plans:
        first = options.overlap if options.overlap != AUTO else OVERLAPS[0]
        raise InvalidArgument(errors[modes[0], first])
    return plans


def build_plan(options: LayerOptions, config: MoEConfig, device: torch.device) -> LayerPlan:
    """Return the plan for options with an explicit mode and overlap. Raises InvalidArgument."""
    low_latency = options.mode == "low_latency"
    if low_latency:
        _check_low_latency(options)
    quantize = options.quantize or ("fp8" if options.fp8 else None)
    gemm = "grouped" if options.batch_invariant else options.gemm
    gemm = choose_gemm(gemm, device, config, fp8=options.fp8, quantize=quantize)
    plan = LayerPlan(options.mode, options.overlap, gemm, quantize)
    if not plan.gemm_push:
        if options.batch_invariant and not low_latency:
            raise InvalidArgument(
                f"batch_invariant is True with overlap={options.overlap!r} and mode='throughput', "
                "where each rank rounds its own sum of a token's rows: use overlap='gemm_push'"
            )
        return plan
    if options.combine_dtype is not None:
        raise InvalidArgument(
            f"combine_dtype is {options.combine_dtype!r}, but with "
            "overlap='gemm_push' the down projection stores rows in the layer's dtype: leave it out"
        )
    if gemm != "grouped":
        raise InvalidArgument(
            "overlap='gemm_push' needs a GEMM that stores rows at their owners, but gemm is "
            f"{gemm!r}: use gemm='grouped'"
        )
    experts = options.count_physical_experts(config)  # upper bound for one rank
    if low_latency and not supports_flag_in_data(config, experts, fp8=options.fp8, device=device):
        raise InvalidArgument(
            "overlap='gemm_push' with mode='low_latency' needs the Hopper GEMM, which does not "
            "support this layer on this device: use overlap='shared_expert' or 'none', or "
            "mode='throughput'"
        )
    return plan


def build_exchange_kwargs(
    config: MoEConfig, options: LayerOptions, plan: LayerPlan
) -> dict[str, Any]:
    """Return keyword arguments for the constructor and `memory_bytes` of a plan's all-to-all."""
    sizes = {
        "max_tokens": options.max_tokens,
        "hidden": config.hidden,
        "top_k": config.routing.top_k,
        "num_experts": options.count_physical_experts(config),
        "dtype": config.dtype,
        "expert_map": options.expert_map,
        "quantize": plan.quantize,
        # Pushing partial sums takes one kernel less than pulling them: a round of AllToAll on
        # 4 x H200 without the experts takes 25 us against 31 at 16 tokens, 169 against 201 at 512
        # (2026-11-21).
        "combine": "gemm_push" if plan.gemm_push else "push",
        "combine_dtype": options.combine_dtype,
    }
    if plan.mode == "throughput":
        return sizes | {"reduce": "receiver" if options.batch_invariant else "sender"}
    # gemm_push needs reduce="receiver". The other overlaps use it, too, to have the same bits.
    return sizes | {"slots": 1, "reduce": "receiver"}


def choose_gemm(
    gemm: str, device: torch.device, config: MoEConfig, *, fp8: bool, quantize: str | None
) -> str:
    """Return the GEMM to use: "grouped" or "torch".

    "auto" selects "grouped" for FP8 weights, and on GPUs for every layer that it supports.

    Args:
        gemm: "auto", "grouped" or "torch".
        fp8: Whether the weights are FP8.
        quantize: Format in which dispatch sends rows.

    Raises:
        InvalidArgument: the GEMM does not support this device, dtype or size.
    """
    unsupported = _find_grouped_gemm_limit(config, fp8, quantize)
    if gemm == AUTO and device.type == "cuda" and not unsupported and is_triton_installed():
        gemm = "grouped"
    if gemm == "grouped" or fp8:
        if unsupported or gemm == "torch":
            reason = unsupported or "does not support FP8 weights; use 'grouped'"
            raise InvalidArgument(f"gemm {gemm!r} {reason}")
        if device.type == "cuda":
            import_triton()  # raises here rather than in the middle of a round
        return "grouped"
    return "torch"


def supports_flag_in_data(
    config: MoEConfig, experts: int, *, fp8: bool, device: torch.device
) -> bool:
    """Whether the down projection supports flag-in-data stores, which the owners poll."""
    if device.type == "cpu":
        return True
    plan = fastest_plan(
        experts,
        1,
        config.hidden,
        config.intermediate,
        FP8 if fp8 else config.dtype,
        flag_in_data=True,
        biased=config.biased,
        out=config.dtype,
        device=device,
    )
    return isinstance(plan, WgmmaPlan)


def _check_low_latency(options: LayerOptions) -> None:
    if options.quantize not in (None, "fp8"):
        raise InvalidArgument(
            f"quantize is {options.quantize!r} with mode='low_latency': use 'fp8' or None"
        )
    if options.max_rows is not None:
        raise InvalidArgument(
            f"max_rows is {options.max_rows} with mode='low_latency', where every expert has rows "
            "for all tokens of all ranks: leave it out"
        )
    if options.max_tokens > MAX_TOKENS:
        raise InvalidArgument(
            f"max_tokens is {options.max_tokens}, but mode='low_latency' supports at most "
            f"{MAX_TOKENS}: use mode='throughput'"
        )


def _find_grouped_gemm_limit(config: MoEConfig, fp8: bool, quantize: str | None) -> str:
    """Return the reason why weft.gemm does not support the layer, or an empty string."""
    if fp8:
        if quantize != "fp8":
            return f"with FP8 weights needs FP8 rows; quantize is {quantize!r}: use 'fp8'"
        for name, size in (("hidden", config.hidden), ("intermediate", config.intermediate)):
            if size % FP8_BLOCK:
                return f"needs sizes that are multiples of {FP8_BLOCK}; {name} is {size}"
        return ""
    if quantize is not None:
        return f"does not dequantize rows; quantize={quantize!r} needs FP8 weights"
    if config.dtype not in (torch.bfloat16, torch.float16):
        return f"supports FP8, bfloat16 and float16; the layer's dtype is {config.dtype}"
    if config.hidden % 8 or config.intermediate % 8:
        return (
            f"needs multiples of 8; hidden is {config.hidden}, intermediate {config.intermediate}"
        )
    return ""
