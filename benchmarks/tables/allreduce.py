"""weft.AllReduce: both hidden sizes on 8 and 4 ranks, epilogues, other libraries, memory."""

from __future__ import annotations

from benchmarks.series import Series, least, load, series
from benchmarks.tables.sources import PEERS, SIZES, Tables, gpus, target
from weft import AllReduce
from weft.bench.limits import allreduce_floor_us

R4 = "allreduce-4xH200-2026-11-21.json"
BACKENDS = ("oneshot", "twoshot", "twoshot_bulk")
LAUNCHES = (("oneshot", "default"), ("twoshot", "default"), ("twoshot_bulk", "c1x448 r1/4 move99"))


def reduce_floors(ranks: int, hidden: int) -> Series:
    """Floors of an all-reduce of bf16 rows."""
    found = {t: allreduce_floor_us(t * hidden * 2, ranks, gpus(ranks)) for t in SIZES}
    return Series({tokens: us for tokens, us in found.items() if us is not None})


def reduce_4(run: int, chosen: str = "backend=auto") -> Series:
    """Medians of one of the runs on 4 GPUs."""
    return series(f"{R4}/runs/{run}/rows[{chosen}]@tokens.us.median")


def best_of_others(ranks: int, hidden: int) -> Series:
    """The least of the recorded and reckoned all-reduces with the norm."""
    return least(
        *(
            Series({float(tokens): us for tokens, us in each["us"].items()})
            for each in load(PEERS)["allreduce"]
            if (each["ranks"], each["hidden"], each["epilogue"]) == (ranks, hidden, "norm")
        )
    )


def ablation_of(
    hidden: int, backend: str, shape: str, epilogue: str = "norm", *, pdl: str | None = None
) -> Series:
    """A backend's times on 8 ranks, with and without programmatic launch the lesser, or one."""
    chosen = f"ranks=8,hidden={hidden},backend={backend},shape={shape},epilogue={epilogue}"
    name = "allreduce-ladder-8xH200-2026-11-20.json"
    found = []
    for early in ("True", "False") if pdl is None else (pdl,):
        try:
            found.append(series(f"{name}/rows[{chosen},pdl={early}]@tokens.us"))
        except KeyError:
            continue  # not every shape was timed both ways
    return least(*found)


def epilogue_8(epilogue: str) -> Series:
    """The fastest backend with an epilogue on 8 ranks, with programmatic launch."""
    return least(*(ablation_of(7168, each, "default", epilogue, pdl="True") for each in BACKENDS))


def baseline_in_run(library: str) -> Series:
    """Another library's all-reduce with the norm, from the run of 2026-11-21."""
    rows = load(R4)["runs"][6]["rows"]
    key = f"{library} 2.11.0, this run"
    return Series({row["tokens"]: row["rivals"][key] for row in rows if key in row["rivals"]})


def reduce_memory(ranks: int) -> Series:
    """MiB of an all-reduce by its most tokens."""
    return Series(
        {
            tokens: AllReduce.memory_bytes(ranks=ranks, hidden=7168, max_tokens=tokens) / (1 << 20)
            for tokens in (128, 512, 2048, 8192)
        }
    )


TABLES: Tables = {
    "allreduce-8-7168": [
        ("weft", least(*(ablation_of(7168, backend, shape) for backend, shape in LAUNCHES))),
        ("by", None),
        ("target", target("all-reduce, 8 ranks, 7168")),
        ("best of others", best_of_others(8, 7168)),
        ("floor", reduce_floors(8, 7168)),
    ],
    "allreduce-8-4096": [
        ("weft", least(*(ablation_of(4096, backend, "default") for backend in BACKENDS))),
        ("target", target("all-reduce, 8 ranks, 4096")),
        ("best of others", best_of_others(8, 4096)),
        ("floor", reduce_floors(8, 4096)),
    ],
    "allreduce-4-other": [
        ("target", target("all-reduce, 4 ranks, 7168")),
        ("hidden 4096, auto", reduce_4(1)),
    ],
    "allreduce-baselines": [
        ("weft, sum + residual + norm", reduce_4(6)),
        ("torch all_reduce (NCCL)", baseline_in_run("torch all_reduce")),
        ("torch symm_mem one-shot", baseline_in_run("torch symm_mem one-shot")),
        ("torch symm_mem two-shot", baseline_in_run("torch symm_mem two-shot")),
    ],
    "epilogues-4": [
        ("nothing", reduce_4(2)),
        ("residual and norm", reduce_4(0)),
        ("and FP8, one scale given", reduce_4(3)),
        ("and FP8, a scale a token", reduce_4(4)),
        ("and FP8, a scale for 128 columns", reduce_4(5)),
    ],
    "epilogues-8": [
        ("nothing", epilogue_8("none")),
        ("residual and norm", epilogue_8("norm")),
        ("and FP8, one scale given", epilogue_8("static")),
        ("and FP8, a scale a token", epilogue_8("token")),
        ("and FP8, a scale for 128 columns", epilogue_8("group")),
    ],
    "allreduce-memory": [(f"{ranks} ranks", reduce_memory(ranks)) for ranks in (8, 4, 2)],
}
