# SPDX-License-Identifier: Apache-2.0
"""triton_dist's low-latency layer, implemented by weft, and other imports of its test."""

import os

if os.environ.get("RIVALS_CPU"):
    from triton_dist.interpreted import round_as_gpus_do

    round_as_gpus_do()
