"""weft inside serving engines: each folder is for one of them, and is imported by its name.

weft.plugins.transformers: expert parallelism of transformers, `ep_implementation="weft"`.
weft.plugins.sglang: MoE blocks of SGLang, `--moe-a2a-backend weft`.
"""
