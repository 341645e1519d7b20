"""Other libraries on 8 and 4 ranks, as recorded: pairs, their kernels, all-reduces, NCCL."""

from __future__ import annotations

from benchmarks.series import load, series
from benchmarks.tables.sources import PROBES, Tables, others_pair, others_reduce

NCCL = load(PROBES)["nccl_us_by_bytes_a_rank"]

TABLES: Tables = {
    "flashinfer": [
        ("8, perfect, bf16", others_pair(0)),
        ("8, random, bf16", others_pair(1)),
        ("8, perfect, fp8 and scales", others_pair(2)),
        ("4, perfect, bf16", others_pair(3)),
        ("4, random, bf16", others_pair(4)),
        ("4, perfect, fp8 and scales", others_pair(5)),
    ],
    "flashinfer-kernels": [
        ("dispatch", series(PROBES + "/flashinfer_kernels_us/dispatch/*")),
        ("combine", series(PROBES + "/flashinfer_kernels_us/combine/*")),
        ("sanitize", series(PROBES + "/flashinfer_kernels_us/sanitize/*")),
        (
            "prepare dispatch + combine",
            series(PROBES + "/flashinfer_kernels_us/prepare dispatch + combine/*"),
        ),
    ],
    "deepep": [
        ("8, perfect, fp8", others_pair(6)),
        ("8, random, fp8", others_pair(7)),
        ("8, perfect, bf16", others_pair(8)),
        ("4, perfect, fp8", others_pair(9)),
        (
            "8, perfect, fp8: dispatch kernel alone",
            series(PROBES + "/deepep_v1_low_latency_kernels_us/dispatch/*"),
        ),
        (
            "8, perfect, fp8: combine kernel alone",
            series(PROBES + "/deepep_v1_low_latency_kernels_us/combine/*"),
        ),
    ],
    "nccl": [
        ("all-gather", list(NCCL["all-gather"].values())),
        ("reduce-scatter", list(NCCL["reduce-scatter"].values())),
    ],
    "reduces-7168": [
        ("8, torch all_reduce, sum", others_reduce(0)),
        ("8, torch all_reduce, with norm", others_reduce(1)),
        ("8, torch symm_mem one-shot, sum", others_reduce(2)),
        ("8, torch symm_mem two-shot, sum", others_reduce(3)),
        ("8, FlashInfer trtllm one-shot, sum", others_reduce(5)),
        ("8, FlashInfer trtllm one-shot, with norm", others_reduce(6)),
        ("8, FlashInfer trtllm two-shot, with norm", others_reduce(7)),
        ("4, torch all_reduce, sum", others_reduce(13)),
        ("4, torch all_reduce, with norm", others_reduce(14)),
        ("4, torch symm_mem two-shot, sum", others_reduce(15)),
        ("4, FlashInfer trtllm one-shot, sum", others_reduce(17)),
        ("4, FlashInfer trtllm one-shot, with norm", others_reduce(18)),
        ("4, FlashInfer trtllm two-shot, with norm", others_reduce(19)),
    ],
    "reduces-4096": [
        ("8, torch all_reduce, sum", others_reduce(8)),
        ("8, torch symm_mem two-shot, sum", others_reduce(9)),
        ("8, FlashInfer trtllm one-shot, sum", others_reduce(10)),
        ("8, FlashInfer trtllm one-shot, with norm", others_reduce(11)),
        ("8, FlashInfer trtllm two-shot, with norm", others_reduce(12)),
        ("4, torch all_reduce, sum", others_reduce(20)),
        ("4, torch symm_mem two-shot, sum", others_reduce(21)),
        ("4, FlashInfer trtllm one-shot, sum", others_reduce(22)),
        ("4, FlashInfer trtllm one-shot, with norm", others_reduce(23)),
        ("4, FlashInfer trtllm two-shot, with norm", others_reduce(24)),
    ],
}
