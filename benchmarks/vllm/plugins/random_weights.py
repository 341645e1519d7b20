# SPDX-License-Identifier: Apache-2.0
"""vLLM's plug-in of these measurements: `load_format="weft_dummy"`."""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Add the loader; vLLM calls this in every process."""
    from fill import fill
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @register_model_loader("weft_dummy")
    class Random(DummyModelLoader):  # type: ignore[misc]  # vLLM is not type-checked
        """Random weights with which every layer affects the output."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            fill(model)
