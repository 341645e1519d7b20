# SPDX-License-Identifier: Apache-2.0
"""The structs of a domain of up to 32 ranks, which is what most tests have."""

from weft.heap.header import header_bytes, mirrors

HEADER_BYTES = header_bytes(1)
Timeline, Header = mirrors(1).Timeline, mirrors(1).Header
