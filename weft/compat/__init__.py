# SPDX-License-Identifier: Apache-2.0
"""The calls of other projects on weft: change an import and keep the engine.

weft.compat.deep_ep: both modes of its Buffer.   weft.compat.triton_dist: its low-latency layer.
weft.compat.flashinfer: `MoeAlltoAll` and `allreduce_fusion` as in flashinfer.comm.
docs/user/compat.md says where they differ.
"""
