# SPDX-License-Identifier: Apache-2.0
"""triton_dist's low-latency layer, from weft, and what its test imports beside it."""

import os

if os.environ.get("RIVALS_CPU"):
    from triton_dist.interpreted import round_as_gpus_do

    round_as_gpus_do()
