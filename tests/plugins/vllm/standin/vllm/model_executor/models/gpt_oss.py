# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS loads an expert at a time."""

from __future__ import annotations

from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts


class GptOssRoutedExperts(RoutedExperts): ...
