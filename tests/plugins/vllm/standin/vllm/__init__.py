# SPDX-License-Identifier: Apache-2.0
"""What weft's plug-in reads and calls of vLLM, written for its tests, in plain torch."""
