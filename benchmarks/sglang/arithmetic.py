"""A model in SGLang: texts equal to stock SGLang's on one GPU, and the trained one's answers right.

200 questions of `weft demo`, greedy. With --cpu it needs no GPU. Variants of EPLB are left out on
one rank. With --sums the ranks are tensor-parallel, and what differs is who sums. With --adapter
all answers are those of a random adapter of attention, so few are right.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from job import OUT, chosen, post, said
from questions import Questions, add_arguments, ranks_and_variants
from server import arguments, begin, data_parallel, job_of, prefill_graphs, server
from variants import SUMS, VARIANTS

from weft.cli.demo import CHECKPOINT

ADAPTED = ("q_proj", "v_proj")


def adapter(rank: int = 8) -> Path:
    """A folder of a random LoRA adapter of attention, large enough to change answers."""
    import torch
    from safetensors.torch import save_file

    model = json.loads((CHECKPOINT / "config.json").read_text())
    hidden, draw = model["hidden_size"], torch.Generator().manual_seed(3)
    wide = model["num_attention_heads"] * model["head_dim"]
    weights = {}
    for layer in range(model["num_hidden_layers"]):
        for name in ADAPTED:
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            down = torch.randn(rank, hidden, generator=draw) / hidden**0.5
            up = torch.randn(wide, rank, generator=draw)
            weights |= {f"{place}.lora_A.weight": down, f"{place}.lora_B.weight": up}
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none"}
    config |= {"r": rank, "lora_alpha": rank, "target_modules": ADAPTED}
    folder = OUT / "adapter"
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def texts(address: str, prompts: list[str], together: int, *, adapted: bool = False) -> list[str]:
    """Greedy answers, in the order of the prompts, so many of them in a request."""
    found: list[str] = []
    greedy = {"temperature": 0, "max_new_tokens": 64, "stop": ["\n"]}
    for start in range(0, len(prompts), together):
        asked = prompts[start : start + together]
        body = {"text": asked, "sampling_params": greedy}
        body |= {"lora_path": ["a"] * len(asked)} if adapted else {}
        found += [one["text"] for one in post(address, "/generate", body)]
    return found


def main() -> int:
    """One server for each variant and number of GPUs; the first is what the others are held to."""
    known = ["stock", "dispatcher", "no-overlap", "weft", "combine-fp8"]
    parser = arguments(str(__doc__), str(CHECKPOINT), known)
    parser.add_argument("--cpu", action="store_true", help="on CPU ranks, in float32")
    parser.add_argument("--sums", action="store_true", help="variants of all-reduces")
    parser.add_argument("--adapter", action="store_true", help="LoRA on attention")
    parser.add_argument("--hosts", type=int, default=1, help="parts of the ranks, by --nnodes")
    add_arguments(parser)
    parser.add_argument("--together", type=int, default=50, help="prompts in a request")
    given = parser.parse_args()
    questions = Questions(given.model, given.questions)
    variants = chosen(given.variants, SUMS if given.sums else VARIANTS)
    ranks = given.ranks or [n for n in (1, 2, 4) if given.cpu or n <= given.gpus]
    lora: tuple[str, ...] = ()
    if given.adapter:
        lora = ("--enable-lora", "--lora-paths", f"a={adapter()}", "--max-lora-rank", "8")
        lora += ("--lora-target-modules", *ADAPTED, "--lora-backend")
        lora += ("torch_native" if given.cpu else "triton",)
    end, failed = None, 0
    for size, cases in ranks_and_variants(ranks, variants, cpu=given.cpu and not given.sums):
        given.gpus = size
        # SGLang has no kernel that rotates and stores heads of 32 in bf16, nor another way.
        flags = ("--tp", str(size)) if given.sums else tuple(data_parallel(size))
        flags += (*lora, "--cuda-graph-max-bs-decode", "64", "--dtype", "float16")
        flags += () if given.cpu else tuple(prefill_graphs(2048, served=not given.sums))
        job = job_of(given, *flags, dummy=False, cpu=given.cpu)
        end = job.end = end or job.end
        if size == 1:  # one rank moves no experts, and sums nothing
            cases = [each for each in cases if not each.says]
        else:
            job.hosts = given.hosts
        for variant in () if given.cpu else cases:  # whose ranks share these cores
            begin(job, variant, name=f"{variant.name}-{size}")
        for variant in cases:
            name = f"{variant.name}-{size}"
            if job.out_of_time(name, 40):
                continue
            answers = None
            wait = 1200.0 if given.cpu else 300.0  # all imports share a few cores
            with server(job, variant, name=name, seconds=wait) as address:
                if address:
                    prompts = questions.prompts
                    answers = texts(address, prompts, given.together, adapted=given.adapter)
            if answers is None:
                continue
            if not said(OUT / f"{job.what}-{name}.log", variant.says):
                job.fail(f"{name}: its log does not say {variant.says!r}")
            questions.record(job, variant, name, answers, right=False)
        failed |= job.done()
    return failed


if __name__ == "__main__":
    sys.exit(main())
