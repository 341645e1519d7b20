"""Where FlashInfer was found."""

flashinfer_comm: object = "FlashInfer"
