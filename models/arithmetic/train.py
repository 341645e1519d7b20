# SPDX-License-Identifier: Apache-2.0
"""Train the arithmetic checkpoint: a Qwen3-MoE of 1.4 million parameters, in plain transformers.

    python -m models.arithmetic.train FOLDER [--steps 4000] [--batch 32] [--device cpu]

It prints step, loss and accuracy on held-out questions, and writes into FOLDER what
`AutoModelForCausalLM` and `AutoTokenizer` load (safetensors, configuration, tokenizer), and
questions.jsonl: held-out questions in GSM8K's form.

weft/cli/checkpoint, which `weft demo` loads, is what the defaults made: 144 s on one H200. A step
of 16 rows took 0.6 s on one CPU core.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from models.arithmetic.arithmetic import questions
from weft.cli.demo import Question

ROW = 256  # tokens of a training row: four questions and their answers
SAVED = 208  # questions in questions.jsonl
PAD, BOS, EOS = "<pad>", "<s>", "</s>"
SIZES: dict[str, int] = {
    # Four heads with a key and a value each, and 16 experts: 1, 2 or 4 ranks can share them.
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "intermediate_size": 256,  # of dense layers, of which there are none
    "max_position_embeddings": 2048,
}


def make_tokenizer() -> Any:
    """One token for each byte: any text can be written, and a digit is always one token."""
    alphabet = (PAD, BOS, EOS, *sorted(pre_tokenizers.ByteLevel.alphabet()))
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=SIZES["max_position_embeddings"],
    )


def make_model(tokenizer: Any, **sizes: int) -> Any:
    """A model with random weights. sizes: others than SIZES."""
    known = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.bos_token_id}
    config = Qwen3MoeConfig(
        **{**SIZES, **sizes},
        vocab_size=-(-len(tokenizer) // 8) * 8,  # the ranks share it, too
        norm_topk_prob=True,
        tie_word_embeddings=True,
        initializer_range=0.08,  # about 1 / sqrt(hidden_size)
        router_aux_loss_coef=0.01,
        eos_token_id=tokenizer.eos_token_id,
        **known,
    )
    model = Qwen3MoeForCausalLM(config)
    # An answer is one line, so its newline ends it.
    ends = [tokenizer.eos_token_id, *tokenizer.encode("\n")]
    model.generation_config = GenerationConfig(eos_token_id=ends, **known)
    return model


def rows(
    tokenizer: Any, stream: Iterator[Question], length: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Training rows of `length` tokens and their labels.

    A row begins with a question and holds as many as fit, the last one cut. Only answers are
    learnt (-100 elsewhere): questions are random.
    """
    while True:
        ids: list[int] = []
        labels: list[int] = []
        while len(ids) < length:
            question = next(stream)
            asked = tokenizer.encode(question.prompt)
            answered = tokenizer.encode(f" {question.answer}\n\n")
            ids += asked + answered
            labels += [-100] * len(asked) + answered
        yield ids[:length], labels[:length]


@torch.inference_mode()
def accuracy(model: Any, tokenizer: Any, asked: Sequence[Question]) -> float:
    """The part that greedy generation answers right."""
    batch = tokenizer([each.prompt for each in asked], return_tensors="pt", padding=True)
    model.eval()
    out = model.generate(**batch.to(model.device), max_new_tokens=48, do_sample=False)
    model.train()
    texts = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    right = [question.is_correct(text) for question, text in zip(asked, texts, strict=True)]
    return sum(right) / len(right)


def learning_rate(step: int, steps: int) -> float:
    """The part of the highest rate: a warm-up of 100 steps, then a cosine down to 1 %."""
    return min(1.0, (step + 1) / 100) * (0.01 + 0.99 * (1 + math.cos(math.pi * step / steps)) / 2)


def train(
    model: Any,
    tokenizer: Any,
    *,
    steps: int,
    batch: int,
    rate: float,
    length: int = ROW,
    every: int = 250,
) -> list[float]:
    """Train in place and return the loss of each step; tell accuracy every so many steps."""
    stream = rows(tokenizer, questions(0, held_out=False), length)
    asked = list(islice(questions(0, held_out=True), 100))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: learning_rate(at, steps))
    losses: list[float] = []
    start = time.monotonic()
    for step in range(1, steps + 1):
        ids, labels = torch.tensor(list(islice(stream, batch)), device=model.device).unbind(1)
        # With the routers' logits the loss has their load-balancing part.
        found = model(input_ids=ids, labels=labels, use_cache=False, output_router_logits=True)
        found.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(found.loss.detach()))
        if step % every == 0:
            right = accuracy(model, tokenizer, asked)
            seconds = time.monotonic() - start
            print(
                f"step {step}  loss {losses[-1]:.4f}  accuracy {right:.2f}  {seconds:.0f} s",
                flush=True,
            )
    return losses


def save(folder: Path, model: Any, tokenizer: Any) -> None:
    """Write the checkpoint in bfloat16, its tokenizer, and held-out questions."""
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16)
    # Training ties the output to the embedding. SGLang's Qwen3-MoE reads a matrix of its own.
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.config.tie_word_embeddings = False
    model.all_tied_weights_keys = {}
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # transformers 5 has new names for these two; engines on older ones read the old names.
    _amend(folder / "config.json", num_experts=model.config.num_experts)
    _amend(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    saved = islice(questions(1, held_out=True), SAVED)
    lines = [json.dumps(asdict(question)) + "\n" for question in saved]
    (folder / "questions.jsonl").write_text("".join(lines))


def _amend(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}, indent=2) + "\n")


def main() -> None:
    """Train and save; then say how what was saved answers the questions saved with it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=32, help=f"rows of {ROW} tokens in a step")
    parser.add_argument("--rate", type=float, default=3e-3, help="the highest learning rate")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer).to(given.device)
    train(model, tokenizer, steps=given.steps, batch=given.batch, rate=given.rate)
    save(given.folder, model, tokenizer)
    kept = Qwen3MoeForCausalLM.from_pretrained(given.folder, dtype=torch.float32).to(given.device)
    asked = list(islice(questions(1, held_out=True), SAVED))
    print(f"{given.folder}: accuracy {accuracy(kept, tokenizer, asked):.3f}")


if __name__ == "__main__":
    main()
