"""One harness for benchmarks: a visitor, never imported by what it measures.

case      what a run measures; an operator adds its sizes, its inputs and its check
run       on every rank: check over poisoned memory, time, check again
check     poison and comparison;   clock: graphs and events, or the host's clock on CPU ranks
cold      the same with flushed caches;   corun: while a matmul runs on the other SMs
moe, lowlatency, allreduce, layer   one operator each
routing   which token goes to which expert;   layer_load, layer_weights: what a layer computes on
limits    what the hardware allows;   peers: recorded figures of other libraries
baselines other libraries in the same run;   moe_baselines, allreduce_baselines: how they are called
report    rows, table, JSON;   compare: two of them;   plot: the picture
trace, layer_trace                 timelines;   allreduce_tune: what "auto" reads
"""
