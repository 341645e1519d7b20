"""The calls of other projects on weft: change an import and keep the engine.

weft.compat.deep_ep, weft.compat.triton_dist: their low-latency calls.
weft.compat.flashinfer: `MoeAlltoAll` as in flashinfer.comm. docs/compat.md says where it differs.
"""
