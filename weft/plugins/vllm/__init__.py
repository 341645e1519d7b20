# SPDX-License-Identifier: Apache-2.0
"""weft inside vLLM: `WEFT_VLLM=block vllm serve ...`, and WEFT_VLLM_ALLREDUCE=1 for all-reduces.

vLLM finds `register` by its entry point; docs/user/vllm.md says what is served. Importing this
package imports nothing of vLLM, and nothing of weft that could fail: vLLM would only log it.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Replace vLLM's routed experts and fused all-reduces by weft's, if the environment asks for
    it.

    vLLM calls it in every process, before it makes a model. Nothing happens unless WEFT_VLLM or
    WEFT_VLLM_ALLREDUCE is set. Every name and signature is checked before anything is registered.

    Raises:
        SetupError: where vLLM is another, or another plug-in has its layer of experts, and
            InvalidArgument for a wrong setting: either ends the server.
    """
    from weft.plugins.settings import Settings
    from weft.plugins.vllm import allreduce, engine

    settings = Settings.read("VLLM")
    if settings.form and not engine.check_vllm():
        from weft.plugins.vllm import layers

        layers.register()
    if settings.allreduce:
        allreduce.register()
