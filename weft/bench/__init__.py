# SPDX-License-Identifier: Apache-2.0
"""One harness for benchmarks: a visitor, never imported by what it measures.

harness   a case, its trials; check over poisoned memory, time, check again; graphs and clocks
moe, lowlatency, allreduce, layer   one operator each: sizes, inputs, check, bytes, floor
routing   which token goes to which expert      limits    what the hardware allows
rivals    other libraries in the same run       machine   what a figure was measured on
report    rows, table, JSON                     plot      the picture      trace   timelines
"""
