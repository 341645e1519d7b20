"""The calls of other projects on weft: change an import and keep the engine.

weft.compat.flashinfer: `MoeAlltoAll` as in flashinfer.comm. docs/compat.md says where it differs.
"""
