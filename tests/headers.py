# SPDX-License-Identifier: Apache-2.0
"""Header structs of a domain of up to 32 ranks, which most tests use."""

from weft.heap.header import header_bytes, header_structs

HEADER_BYTES = header_bytes(1)
Header = header_structs(1).Header
