# SPDX-License-Identifier: Apache-2.0
"""Plug-ins for serving engines. Each engine imports only its subpackage.

weft.plugins.transformers: expert parallelism of transformers, `ep_implementation="weft"`.
weft.plugins.sglang: MoE blocks of SGLang, `--moe-a2a-backend weft`.
weft.plugins.vllm: routed experts of vLLM, `WEFT_VLLM=block`.

The plug-ins share the modules of this package: checks of the engine's API, weight conversion, MoE
blocks, settings and fault detection.
"""
