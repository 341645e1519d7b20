# SPDX-License-Identifier: Apache-2.0
"""Flags, as a worker has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class ParallelConfig:
    all2all_backend: str = "allgather_reducescatter"
    expert_placement_strategy: str = "linear"
    enable_dbo: bool = False
    ubatch_size: int = 0
    enable_elastic_ep: bool = False
    prefill_context_parallel_size: int = 1


@dataclass
class ModelConfig:
    enforce_eager: bool = True
    enable_sleep_mode: bool = False


@dataclass
class SchedulerConfig:
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 32


@dataclass
class CompilationConfig:
    max_cudagraph_capture_size: int | None = None


@dataclass
class VllmConfig:
    model_config: ModelConfig = field(default_factory=ModelConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    lora_config: Any = None
    compilation_config: CompilationConfig = field(default_factory=CompilationConfig)


CURRENT = VllmConfig()


def get_current_vllm_config() -> VllmConfig:
    return CURRENT
