# SPDX-License-Identifier: Apache-2.0
"""Where FlashInfer was found."""

flashinfer_comm: object = "FlashInfer"
