# SPDX-License-Identifier: Apache-2.0
"""weft inside serving engines: each folder is for one of them, and is imported by its name.

weft.plugins.transformers: expert parallelism of transformers, `ep_implementation="weft"`.
weft.plugins.sglang: MoE blocks of SGLang, `--moe-a2a-backend weft`.
weft.plugins.vllm: routed experts of vLLM, `WEFT_VLLM=block`.

What they share lies beside them: names of an engine, its weights as weft takes them, blocks of a
served model, settings, and faults.
"""
