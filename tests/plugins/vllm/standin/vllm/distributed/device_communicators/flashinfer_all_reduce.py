# SPDX-License-Identifier: Apache-2.0
"""Where FlashInfer was found."""

fi_ar_available = True
flashinfer_comm: object = "FlashInfer"
