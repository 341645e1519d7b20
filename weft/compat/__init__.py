# SPDX-License-Identifier: Apache-2.0
"""Drop-in replacements for other projects' communication libraries.

weft.compat.deep_ep: deep_ep's Buffer, both modes.
weft.compat.triton_dist: triton_dist's low-latency layer.
weft.compat.flashinfer: `MoeAlltoAll` and `allreduce_fusion` of flashinfer.comm.
docs/user/compat.md lists the differences.
"""
