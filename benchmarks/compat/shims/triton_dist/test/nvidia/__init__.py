"""The runner puts triton_dist's own reference here."""
