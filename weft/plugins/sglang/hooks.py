# SPDX-License-Identifier: Apache-2.0
"""What weft patches in SGLang."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from weft.errors import SetupError
from weft.plugins.names import Engine, Known

SGLANG = Engine("SGLang", ("sglang",), ("0.5.23", "0.5.17"))
Kind = Literal["AROUND", "AFTER"]  # names of SGLang's HookType
SRT = "sglang.srt."
NAME = "weft"  # of the backend, after --moe-a2a-backend and --elastic-ep-backend
RUNNER = SRT + "model_executor.model_runner.ModelRunner."
FORWARD = (
    "self, forward_batch, skip_attn_backend_init=, pp_proxy_tensors=, reinit_attn_backend=, "
    "split_forward_count="
)


@dataclass(frozen=True, slots=True)
class Hook(Known):
    """A function or method of SGLang, and what weft hangs on it.

    kind: AROUND: function(original, *args, **kwargs) returns the result; AFTER: function(result,
        *args, **kwargs) returns another result or None.
    """

    function: Callable[..., Any] = field(kw_only=True)
    kind: Kind = field(default="AROUND", kw_only=True)


def install(hooks: Iterable[Hook]) -> None:
    """Hand the hooks to SGLang's registry, which applies them when all plug-ins have registered."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in SGLANG.here(hooks):
        HookRegistry.register(hook.target, hook.function, HookType[hook.kind])


def check_applied(hooks: Iterable[Hook]) -> None:
    """SGLang logs a hook that it cannot apply, and goes on without: raise SetupError instead."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    patched = HookRegistry._patched
    missing = [hook.target for hook in SGLANG.here(hooks) if hook.target not in patched]
    if missing:
        raise SetupError(
            f"SGLang did not apply weft's hooks on {', '.join(missing)}: its log says why, above"
        )


def device_of(runner: Any) -> torch.device:
    """Where a ModelRunner's model is."""
    return torch.device("cuda", runner.gpu_id) if runner.device == "cuda" else torch.device("cpu")


def resolved(server_args: Any) -> Any:
    """The flags as SGLang resolved them; 0.5.23 leaves server_args as the user wrote them."""
    from sglang.srt.arg_groups.overrides import resolved_view

    return resolved_view(server_args)


def end_server(parent: int) -> Callable[[], None]:
    """What ends a server from one of its schedulers, as SGLang's own do: SIGQUIT to the parent."""

    def end() -> None:
        if os.getppid() == parent:
            os.kill(parent, signal.SIGQUIT)

    return end
