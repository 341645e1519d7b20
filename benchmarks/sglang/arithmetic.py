# SPDX-License-Identifier: Apache-2.0
"""A model in SGLang: texts equal to stock SGLang's on one GPU, and the trained one's answers right.

200 questions of `weft demo`, greedy. With --cpu it needs no GPU. Variants of EPLB are left out on
one rank. With --sums the ranks are tensor-parallel, and what differs is who sums. With --adapter
all answers are those of a random adapter of attention, so few are right.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from job import OUT, Job, Variant, chosen, in_servers, post
from questions import Questions, add_arguments, in_each_size
from server import arguments, begin, of_trained
from variants import SUMS, VARIANTS

from weft.cli.demo import CHECKPOINT

LATE = 1200.0  # seconds that a request may take: CPU ranks share a few cores
ADAPTED = ("q_proj", "v_proj")
GREEDY = {"temperature": 0, "max_new_tokens": 64, "stop": ["\n"]}


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
    for start in range(0, len(prompts), together):
        asked = prompts[start : start + together]
        body = {"text": asked, "sampling_params": GREEDY}
        body |= {"lora_path": ["a"] * len(asked)} if adapted else {}
        found += [one["text"] for one in post(address, "/generate", body, timeout=LATE)]
    return found


def main() -> int:
    """One server for each variant and number of GPUs; the first is what the others are held to."""
    known = ["stock", "dispatcher", "no-overlap", "weft", "combine-fp8"]
    parser = arguments(str(__doc__), str(CHECKPOINT), known)
    parser.add_argument("--sums", action="store_true", help="variants of all-reduces")
    parser.add_argument("--adapter", action="store_true", help="LoRA on attention")
    parser.add_argument("--hosts", type=int, default=1, help="parts of the ranks, by --nnodes")
    add_arguments(parser)
    parser.add_argument("--together", type=int, default=50, help="prompts in a request")
    given = parser.parse_args()
    questions = Questions(given.model, given.questions)
    given.ranks = given.ranks or [n for n in (1, 2, 4) if given.cpu or n <= given.gpus]
    lora: tuple[str, ...] = ()
    if given.adapter:
        lora = ("--enable-lora", "--lora-paths", f"a={adapter()}", "--max-lora-rank", "8")
        lora += ("--lora-target-modules", *ADAPTED, "--lora-backend")
        lora += ("torch_native" if given.cpu else "triton",)

    def made(ranks: int) -> Job:
        job = of_trained(given, ranks, ("--tp", str(ranks)) if given.sums else None)
        job.flags += lora
        job.hosts = given.hosts if ranks > 1 else 1
        return job

    def ask(job: Job, cases: list[Variant]) -> None:
        def measure(variant: Variant, name: str, address: str) -> None:
            answers = texts(address, questions.prompts, given.together, adapted=given.adapter)
            job.heard(name, variant.does)
            questions.record(job, variant, name, answers, right=False)

        if job.gpus == 1:  # one rank moves no experts, and sums nothing
            cases = [each for each in cases if not (each.does or given.sums and each.says)]
        in_servers(job, cases, begin, measure, needs=40, suffix=f"-{job.gpus}")

    variants = chosen(given.variants, SUMS if given.sums else VARIANTS)
    return in_each_size(given, variants, made, ask, alone=given.cpu and not given.sums)


if __name__ == "__main__":
    sys.exit(main())
