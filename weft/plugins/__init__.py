# SPDX-License-Identifier: Apache-2.0
"""Plug-ins of serving engines. Each subpackage is imported by its own engine only.

weft.plugins.transformers: expert parallelism of transformers, `ep_implementation="weft"`.
weft.plugins.sglang: MoE blocks of SGLang, `--moe-a2a-backend weft`.
weft.plugins.vllm: routed experts of vLLM, `WEFT_VLLM=block`.

The modules of this package are shared by the plug-ins: checked engine names, weight conversion,
served MoE blocks, settings and fault detection.
"""
