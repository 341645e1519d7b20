# SPDX-License-Identifier: Apache-2.0
"""Names of transformers' experts."""

from __future__ import annotations

from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts


class TransformersRoutedExperts(RoutedExperts): ...
