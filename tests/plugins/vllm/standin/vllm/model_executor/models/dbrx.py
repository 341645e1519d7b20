# SPDX-License-Identifier: Apache-2.0
"""DBRX has three matrices an expert."""

from __future__ import annotations

from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts


class DbrxExperts(RoutedExperts): ...
