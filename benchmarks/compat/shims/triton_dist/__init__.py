"""triton_dist's low-latency layer, from weft, and what its test imports beside it."""
