# SPDX-License-Identifier: Apache-2.0
"""Check a model in SGLang: texts equal stock SGLang's on one GPU, and the trained model is right.

It asks 200 questions of `weft demo`, greedily. With --cpu it needs no GPU. EPLB variants are
skipped on one rank. With --sums, ranks are tensor-parallel, and variants differ in their
all-reduce. With --adapter, answers use a random adapter of attention, so few are right.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from job import OUT, Job, Variant, in_servers, post, select_variants
from questions import Questions, add_arguments, in_each_size
from server import arguments, begin, of_trained
from variants import SUMS, VARIANTS

from weft.cli.demo import CHECKPOINT

LATE = 1200.0  # timeout of a request in seconds: CPU ranks share a few cores
ADAPTED = ("q_proj", "v_proj")
GREEDY = {"temperature": 0, "max_new_tokens": 64, "stop": ["\n"]}


def adapter(rank: int = 8) -> Path:
    """Write a random LoRA adapter of attention that changes answers, and return its folder."""
    import torch
    from safetensors.torch import save_file

    model = json.loads((CHECKPOINT / "config.json").read_text())
    hidden, generator = model["hidden_size"], torch.Generator().manual_seed(3)
    wide = model["num_attention_heads"] * model["head_dim"]
    weights = {}
    for layer in range(model["num_hidden_layers"]):
        for name in ADAPTED:
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            down = torch.randn(rank, hidden, generator=generator) / hidden**0.5
            up = torch.randn(wide, rank, generator=generator)
            weights |= {f"{place}.lora_A.weight": down, f"{place}.lora_B.weight": up}
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none"}
    config |= {"r": rank, "lora_alpha": rank, "target_modules": ADAPTED}
    folder = OUT / "adapter"
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def texts(address: str, prompts: list[str], together: int, *, adapted: bool = False) -> list[str]:
    """Return greedy answers in the order of the prompts, `together` prompts per request."""
    answers: list[str] = []
    for start in range(0, len(prompts), together):
        batch = prompts[start : start + together]
        body = {"text": batch, "sampling_params": GREEDY}
        body |= {"lora_path": ["a"] * len(batch)} if adapted else {}
        answers += [one["text"] for one in post(address, "/generate", body, timeout=LATE)]
    return answers


def main() -> int:
    """Run one server per variant and number of GPUs; the first is the baseline."""
    known = ["stock", "dispatcher", "no-overlap", "weft", "combine-fp8"]
    parser = arguments(str(__doc__), str(CHECKPOINT), known)
    parser.add_argument("--sums", action="store_true", help="variants of all-reduces")
    parser.add_argument("--adapter", action="store_true", help="LoRA on attention")
    parser.add_argument("--hosts", type=int, default=1, help="split ranks into hosts, by --nnodes")
    add_arguments(parser)
    parser.add_argument("--together", type=int, default=50, help="prompts in a request")
    args = parser.parse_args()
    questions = Questions(args.model, args.questions)
    args.ranks = args.ranks or [n for n in (1, 2, 4) if args.cpu or n <= args.gpus]
    lora: tuple[str, ...] = ()
    if args.adapter:
        lora = ("--enable-lora", "--lora-paths", f"a={adapter()}", "--max-lora-rank", "8")
        lora += ("--lora-target-modules", *ADAPTED, "--lora-backend")
        lora += ("torch_native" if args.cpu else "triton",)

    def new_job(ranks: int) -> Job:
        job = of_trained(args, ranks, ("--tp", str(ranks)) if args.sums else None)
        job.flags += lora
        job.hosts = args.hosts if ranks > 1 else 1
        return job

    def ask(job: Job, cases: list[Variant]) -> None:
        def measure(variant: Variant, name: str, address: str) -> None:
            answers = texts(address, questions.prompts, args.together, adapted=args.adapter)
            job.check_log(name, variant.answer_text)
            questions.record(job, variant, name, answers, right=False)

        if job.gpus == 1:  # one rank neither moves experts nor reduces
            cases = [
                each for each in cases if not (each.answer_text or args.sums and each.startup_text)
            ]
        in_servers(job, cases, begin, measure, needs=40, suffix=f"-{job.gpus}")

    variants = select_variants(args.variants, SUMS if args.sums else VARIANTS)
    return in_each_size(args, variants, new_job, ask, alone=args.cpu and not args.sums)


if __name__ == "__main__":
    sys.exit(main())
