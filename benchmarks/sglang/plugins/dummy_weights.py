# SPDX-License-Identifier: Apache-2.0
"""SGLang's plug-in "weft_dummy": dummy weights from `fill`."""

from __future__ import annotations


def register() -> None:
    """Replace SGLang's initializer of dummy weights."""
    from fill import fill
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.model_loader.weight_utils.initialize_dummy_weights"
    HookRegistry.register(target, fill, HookType.REPLACE)
