"""Other all-reduces, as `weft bench allreduce --peers` times them.

None of them may use NVLink multicast: the figures are for machines where it is off, and some
drivers must not be asked for it. FlashInfer is made with backend="trtllm" for the same reason,
never "auto" or "mnnvl", which probe for it.

Written against torch 2.8 to 2.11 and FlashInfer 0.6 and 0.7 (`flashinfer.comm`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional

from weft import reference
from weft.bench.allreduce import EPS, ReduceCase, Rows, arguments_of, make_rows
from weft.bench.baselines import Baseline, all_sizes, off_by
from weft.bench.check import settle
from weft.bench.clock import Calls
from weft.memory import Group

ONE_SHOT_MOST = 512  # tokens that FlashInfer's one-shot is measured with
_PLAIN, _NORM = 0, 1  # FlashInfer's patterns


TOLERANCE = 2.0**-5  # of the largest number: they may round after every add


def with_norm(rows: Rows, summed: torch.Tensor) -> torch.Tensor:
    """torch's residual add and RMSNorm, as an engine without fusion runs them."""
    total = summed + rows.residual
    return functional.rms_norm(total, (total.shape[-1],), rows.weight, EPS)


class _Library:
    """A library made for the largest size."""

    def __init__(self, group: Group, case: ReduceCase) -> None:
        self.group, self.case = group, case
        self._process_group = group.process_group()
        self._norm = case.epilogue != "none"

    def call(self, rows: Rows) -> Callable[[], torch.Tensor]:
        """Bind one size; the call returns the sum or the norm, `[tokens, hidden]`."""
        raise NotImplementedError

    def trial(self, tokens: int) -> ReduceCall:
        """One size."""
        return ReduceCall(self, tokens)


class ReduceCall:
    """One size of a library."""

    def __init__(self, library: Any, tokens: int) -> None:
        self.group, self.case = library.group, library.case
        device = self.group.device
        self._all = [make_rows(self.case, tokens, r, device) for r in range(self.group.size)]
        self._call = library.call(self._all[self.group.rank])

    def calls(self) -> Calls:
        """The call."""
        return Calls.of(self._call)

    def check(self) -> str | None:
        """One call against the reference."""
        settle(self.group)
        rows = self._all[self.group.rank]
        got = self._call()
        found = reference.allreduce_fused(
            [each.x for each in self._all], **arguments_of(self.case, rows)
        )
        want = found.out if self.case.epilogue == "none" else found.norm
        assert want is not None
        return off_by(self.group, got, want, TOLERANCE)


class TorchReduce(_Library):
    """torch.distributed's all_reduce (NCCL on GPUs, gloo on CPUs), then torch's norm."""

    def __init__(self, group: Group, case: ReduceCase, most: int) -> None:
        super().__init__(group, case)

    def call(self, rows: Rows) -> Callable[[], torch.Tensor]:
        """Bind one size. It sums in place, so every call but the first sums sums."""
        x = rows.x.clone()

        def reduce() -> torch.Tensor:
            dist.all_reduce(x, group=self._process_group)
            return with_norm(rows, x) if self._norm else x

        return reduce


class SymmetricReduce(_Library):
    """torch's symmetric memory, one-shot or two-shot, then torch's norm. In place, as above."""

    def __init__(self, group: Group, case: ReduceCase, most: int, *, one_shot: bool) -> None:
        super().__init__(group, case)
        memory: Any = importlib.import_module("torch.distributed._symmetric_memory")
        self._name, self._one_shot = self._process_group.group_name, one_shot
        shape = (most, case.hidden)
        self._whole = memory.empty(shape, dtype=case.out_dtype, device=group.device)
        memory.rendezvous(self._whole, self._name)

    def call(self, rows: Rows) -> Callable[[], torch.Tensor]:
        """Bind one size: its rows lie in symmetric memory already, as these calls ask for."""
        x = self._whole[: len(rows.x)]
        x.copy_(rows.x)
        ops: Any = torch.ops.symm_mem

        def reduce() -> torch.Tensor:
            if self._one_shot:
                found: torch.Tensor = ops.one_shot_all_reduce(x, "sum", self._name)
            else:
                found = ops.two_shot_all_reduce_(x, "sum", self._name)
            return with_norm(rows, found) if self._norm else found

        return reduce


class FlashInferReduce(_Library):
    """`flashinfer.comm.allreduce_fusion` with backend="trtllm", one-shot or two-shot."""

    def __init__(self, group: Group, case: ReduceCase, most: int, *, one_shot: bool) -> None:
        super().__init__(group, case)
        self._comm: Any = importlib.import_module("flashinfer.comm")
        memory: Any = importlib.import_module("flashinfer.comm.mnnvl")
        self._pattern = _NORM if self._norm else _PLAIN
        self._one_shot = one_shot
        self._workspace = self._comm.create_allreduce_fusion_workspace(
            backend="trtllm",
            world_size=group.size,
            rank=group.rank,
            max_token_num=most,
            hidden_dim=case.hidden,
            dtype=case.out_dtype,
            gpus_per_node=group.size,
            comm_backend=memory.TorchDistBackend(self._process_group),
            group=self._process_group,
        )

    def call(self, rows: Rows) -> Callable[[], torch.Tensor]:
        """Bind one size, with outputs of its own."""
        written = {"output": torch.empty_like(rows.x)}
        given: dict[str, Any] = {}
        if self._norm:
            written = {name: torch.empty_like(rows.x) for name in ("residual_out", "norm_out")}
            given = {"residual_in": rows.residual, "rms_gamma": rows.weight, "rms_eps": EPS}
        answer = written["norm_out" if self._norm else "output"]

        def reduce() -> torch.Tensor:
            self._comm.allreduce_fusion(
                input=rows.x,
                workspace=self._workspace,
                pattern=self._pattern,
                launch_with_pdl=True,
                use_oneshot=self._one_shot,
                fp32_acc=True,
                **written,
                **given,
            )
            return answer

        return reduce


def _refuses(
    case: ReduceCase, devices: tuple[str, ...] = ("cuda",), ranks: tuple[int, ...] = ()
) -> str | None:
    """Why a library that has kernels for these cannot run the case, or None; no ranks: any."""
    if case.epilogue not in ("none", "norm"):
        return f"not compared with epilogue {case.epilogue}"
    if case.device not in devices:
        return "needs GPUs"
    if ranks and case.ranks not in ranks:
        return f"serves {', '.join(map(str, ranks))} ranks, not {case.ranks}"
    return None


def _few(case: ReduceCase) -> list[int]:
    return [size for size in case.tokens if size <= ONE_SHOT_MOST]


def _more_than_ranks(case: ReduceCase) -> list[int]:
    return [size for size in case.tokens if size > case.ranks]


def _both_shots(
    name: str,
    package: tuple[str, str],
    library: Callable[..., _Library],
    refuses: Callable[[ReduceCase], str | None],
    two_shot_sizes: Callable[[ReduceCase], list[int]],
) -> tuple[Baseline, Baseline]:
    """One-shot of a library, for few tokens, and two-shot; package: module and distribution."""
    one, two = (partial(library, one_shot=one_shot) for one_shot in (True, False))
    return (
        Baseline(f"{name} one-shot", *package, make=one, refuses=refuses, sizes=_few),
        Baseline(f"{name} two-shot", *package, make=two, refuses=refuses, sizes=two_shot_sizes),
    )


_TORCH, _FLASHINFER = ("torch", "torch"), ("flashinfer", "flashinfer-python")
_even = partial(_refuses, ranks=(2, 4, 8))  # numbers of ranks that FlashInfer has kernels for
_anywhere = partial(_refuses, devices=("cuda", "cpu"))
BASELINES: tuple[Baseline, ...] = (
    Baseline("torch all_reduce", *_TORCH, make=TorchReduce, refuses=_anywhere),
    *_both_shots("torch symm_mem", _TORCH, SymmetricReduce, _refuses, all_sizes),
    *_both_shots("FlashInfer trtllm", _FLASHINFER, FlashInferReduce, _even, _more_than_ranks),
)
