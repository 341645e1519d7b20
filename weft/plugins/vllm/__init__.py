# SPDX-License-Identifier: Apache-2.0
"""weft's plug-in for vLLM: `WEFT_VLLM=block vllm serve ...`, and WEFT_VLLM_ALLREDUCE=1.

vLLM finds `register` by its entry point; docs/user/vllm.md lists what is supported. vLLM only logs
errors of this import, so the package imports neither vLLM nor any module of weft that could fail.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Replace vLLM's routed experts and fused all-reduces by weft's, depending on the environment.

    vLLM calls this in every process before it constructs a model. It does nothing unless WEFT_VLLM
    or WEFT_VLLM_ALLREDUCE is set. All names and signatures are checked before anything is
    registered. An error ends the server.

    Raises:
        SetupError: If the vLLM version is not supported, or another plug-in replaces its layer of
            experts.
        InvalidArgument: If a setting is invalid.
    """
    from weft.plugins.settings import Settings
    from weft.plugins.vllm import allreduce, engine

    settings = Settings.read("VLLM")
    if settings.form and not engine.check_vllm():
        from weft.plugins.vllm import layers

        layers.register()
    if settings.allreduce:
        allreduce.register()
    if settings.form or settings.allreduce:
        engine.patch_worker()
