# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of weft's operators. Nothing that they measure imports them.

harness: cases and trials; checks over poisoned memory, timing, CUDA graphs.
moe, lowlatency, allreduce, layer: one operator each, with sizes, inputs, checks, bytes and floor.
routing: expert ids of tokens.  limits: what the hardware allows.  machine: where a run happened.
baselines: other libraries in the same run.  report, plot, trace: tables, JSON, pictures, timelines.
"""
