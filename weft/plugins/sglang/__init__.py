"""weft inside SGLang: `--moe-a2a-backend weft`; docs/sglang.md says what is served."""
