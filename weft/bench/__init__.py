"""Benchmarks of weft's operators: a visitor, never imported by what it measures.

cases    what is measured: sizes by name, settings of one run
routing  which token goes to which expert, and the bytes this puts on the wire
trial    one exchange under test: inputs, identity experts, the check against the reference
clock    time per call: CUDA graphs and events, or the host's clock on CPU ranks
cold     the same with flushed caches;   beside: while a matrix product runs on the other SMs
moe      the ranks' body and the run as a whole
peers    recorded figures of other libraries;   limits: of the machine they ran on
rivals   other libraries in the same run, through adapters
summary  from samples to figures;   report: table, JSON;   plot: the picture
session  cases one after the other, and what is written of them
lowlatency, lowlatency_*  the same for the low-latency all-to-all
allreduce, allreduce_*  the same for the fused all-reduce;   allreduce_tune: the table it chooses by
"""
