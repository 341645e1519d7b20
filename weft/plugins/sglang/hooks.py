# SPDX-License-Identifier: Apache-2.0
"""Class of the hooks for SGLang, and functions that the hooks share."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from weft.errors import SetupError
from weft.plugins.engine_api import Engine, ExpectedAPI

SGLANG = Engine("SGLang", ("sglang",), ("0.5.23", "0.5.17"))
Kind = Literal["AROUND", "AFTER"]  # names of SGLang's HookType
SRT = "sglang.srt."
NAME = "weft"  # value of --moe-a2a-backend and --elastic-ep-backend
RUNNER = SRT + "model_executor.model_runner.ModelRunner."
FORWARD = (
    "self, forward_batch, skip_attn_backend_init=, pp_proxy_tensors=, reinit_attn_backend=, "
    "split_forward_count="
)


@dataclass(frozen=True, slots=True)
class Hook(ExpectedAPI):
    """A hook on a function or method of SGLang.

    Attributes:
        function: The hook.
        kind: AROUND: function(original, *args, **kwargs) returns the result. AFTER:
            function(result, *args, **kwargs) returns a replacement of the result, or None.
    """

    function: Callable[..., Any] = field(kw_only=True)
    kind: Kind = field(default="AROUND", kw_only=True)


def install(hooks: Iterable[Hook]) -> None:
    """Register the hooks with SGLang, which applies them once all plug-ins have registered."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in SGLANG.select_entries(hooks):
        HookRegistry.register(hook.target, hook.function, HookType[hook.kind])


def check_applied(hooks: Iterable[Hook]) -> None:
    """Raise SetupError for hooks that SGLang failed to apply; SGLang itself only logs that."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    patched = HookRegistry._patched
    missing = [hook.target for hook in SGLANG.select_entries(hooks) if hook.target not in patched]
    if missing:
        raise SetupError(
            f"SGLang did not apply weft's hooks on {', '.join(missing)}: see its log above"
        )


def get_model_device(runner: Any) -> torch.device:
    """Return the device of a ModelRunner's model."""
    return torch.device("cuda", runner.gpu_id) if runner.device == "cuda" else torch.device("cpu")


def resolve_flags(server_args: Any) -> Any:
    """Return the resolved flags. In 0.5.23, server_args has the flags as the user passed them."""
    from sglang.srt.arg_groups.overrides import resolved_view

    return resolved_view(server_args)


def create_server_terminator(parent: int) -> Callable[[], None]:
    """Return a function that ends the server as SGLang does: by SIGQUIT to the parent process."""

    def end() -> None:
        if os.getppid() == parent:
            os.kill(parent, signal.SIGQUIT)

    return end
