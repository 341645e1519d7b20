"""A trained model in SGLang: right answers, and texts equal to stock SGLang's on one GPU.

The checkpoint of `weft demo`, 200 of its questions, greedy. With --cpu it needs no GPU: SGLang's
own way then serves one rank, and weft any number. Variants of EPLB are left out on one rank.
With --sums the ranks are tensor-parallel, and what differs is who sums. With --adapter all answers
are those of a random adapter of attention, so few are right.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from job import OUT, chosen, post, said
from server import arguments, begin, data_parallel, job_of, prefill_graphs, server
from variants import SUMS, VARIANTS

from weft.cli.demo import CHECKPOINT, Question, read_questions

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


def texts(
    address: str, questions: list[Question], together: int, *, adapted: bool = False
) -> list[str]:
    """Greedy answers, in the order of the questions, so many prompts in a request."""
    found: list[str] = []
    greedy = {"temperature": 0, "max_new_tokens": 64, "stop": ["\n"]}
    for start in range(0, len(questions), together):
        asked = [one.prompt for one in questions[start : start + together]]
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
    parser.add_argument("--ranks", type=int, nargs="+", help="(default: 1, 2, 4, as GPUs go)")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--together", type=int, default=50, help="prompts in a request")
    given = parser.parse_args()
    questions = read_questions(CHECKPOINT / "questions.jsonl")[: given.questions]
    ranks = given.ranks or [n for n in (1, 2, 4) if given.cpu or n <= given.gpus]
    lora: tuple[str, ...] = ()
    if given.adapter:
        lora = ("--enable-lora", "--lora-paths", f"a={adapter()}", "--max-lora-rank", "8")
        lora += ("--lora-target-modules", *ADAPTED, "--lora-backend")
        lora += ("torch_native" if given.cpu else "triton",)
    first: list[str] | None = None
    end, failed = None, 0
    for size in ranks:
        given.gpus = size
        # SGLang has no kernel that rotates and stores heads of 32 in bf16, nor another way.
        flags = ("--tp", str(size)) if given.sums else tuple(data_parallel(size))
        flags += (*lora, "--cuda-graph-max-bs-decode", "64", "--dtype", "float16")
        flags += () if given.cpu else tuple(prefill_graphs(2048, served=not given.sums))
        job = job_of(given, *flags, dummy=False, cpu=given.cpu)
        end = job.end = end or job.end
        variants = [
            each
            for each in chosen(given.variants, SUMS if given.sums else VARIANTS)
            if given.sums or not (given.cpu and not each.weft and size > 1)
            if not (each.says and size == 1)  # one rank moves no experts, and sums nothing
        ]
        for variant in () if given.cpu else variants:  # whose ranks share these cores
            begin(job, variant, name=f"{variant.name}-{size}")
        for variant in variants:
            name = f"{variant.name}-{size}"
            if job.out_of_time(name, 40):
                continue
            answers = None
            wait = 1200.0 if given.cpu else 300.0  # all imports share a few cores
            with server(job, variant, name=name, seconds=wait) as address:
                if address:
                    answers = texts(address, questions, given.together, adapted=given.adapter)
            if answers is None:
                continue
            if not said(OUT / f"{job.what}-{name}.log", variant.says):
                job.fail(f"{name}: its log does not say {variant.says!r}")
            first = first or answers
            right = sum(q.is_right(text) for q, text in zip(questions, answers, strict=True))
            result = {
                "right": right / len(answers),
                "equal": sum(a == b for a, b in zip(first, answers, strict=True)) / len(answers),
                "questions": len(answers),
            }
            (OUT / f"arithmetic-{name}.json").write_text(json.dumps(answers, indent=0))
            job.record(variant, result)
        failed |= job.done()
    return failed


if __name__ == "__main__":
    sys.exit(main())
