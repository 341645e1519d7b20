# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of weft's operators. No operator imports them.

harness: cases and trials, checks over poisoned memory, timing and CUDA graphs.
moe, lowlatency, allreduce, layer: the cases and trials of one operator each.
routing: generation of expert ids.  limits: measured hardware limits.  machine: machine and code.
baselines, collectives: other libraries.  report, plot, trace: tables, JSON, plots and traces.
"""
