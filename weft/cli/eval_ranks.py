"""A checkpoint that answers prompts by transformers, in one process or as parts on ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from transformers.distributed import DistributedConfig

from weft.cli.eval_job import Answers, Job, Run
from weft.cli.gsm8k import STOP
from weft.memory import Group
from weft.plugins import transformers as plugin

LATE = 600.0  # seconds that a layer waits for a peer: a machine may be slow to read or compile
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Responder:
    """A checkpoint that was loaded, or a rank's part of it, and its tokenizer.

    group: the ranks that it is spread over, None for one process.
    """

    def __init__(self, job: Job, run: Run, group: Group | None = None) -> None:
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.job, self.group, self._own = job, group, run.own_batches
        options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(job.checkpoint, **options)
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        if group is not None:
            if run.exchange == "weft":
                plugin.register(timeout=LATE)
            shared_by = {"fsdp_size" if run.own_batches else "tp_size": group.size}
            options["distributed_config"] = DistributedConfig(
                **shared_by, ep_size=group.size, ep_implementation=run.exchange
            )
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            job.checkpoint,
            dtype="auto" if job.dtype is None else DTYPES[job.dtype],
            use_safetensors=True,
            **options,
        ).eval()

    def generate(self, prompts: list[str], max_new_tokens: int, **more: Any) -> list[list[int]]:
        """Greedy tokens behind each prompt, without padding. Collective on ranks."""
        batch = self.tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        with torch.no_grad():  # under inference_mode FSDP could not keep the weights it gathers
            out = self.model.generate(
                **batch.to(self.model.device),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                pad_token_id=self.tokenizer.pad_token_id,
                stop_strings=[STOP],
                tokenizer=self.tokenizer,
                # A rank whose texts are done goes on: the others need its experts.
                synced_gpus=self.group is not None and self._own,
                **more,
            )
        new = out[:, batch["input_ids"].shape[1] :].tolist()
        return [[token for token in row if token != self.tokenizer.pad_token_id] for row in new]

    def answer(self) -> Answers:
        """Answer the job's prompts, or this rank's part, after a warm-up. Collective on ranks."""
        rank, ranks = (self.group.rank, self.group.size) if self.group and self._own else (0, 1)
        parts = self.job.parts(rank, ranks)
        self._answer(parts[0], 2)  # compiles and allocates
        if self.group is not None:
            self.group.barrier(timeout=LATE)
        start = time.perf_counter()
        rows = [row for part in parts for row in self._answer(part, self.job.max_new_tokens)]
        seconds = time.perf_counter() - start
        texts = self.tokenizer.batch_decode(rows, skip_special_tokens=True)
        return Answers(tuple(texts), sum(map(len, rows)), seconds)

    def _answer(self, part: list[int], max_new_tokens: int) -> list[list[int]]:
        """Tokens for some prompts; a rank without one answers the first, which does not count."""
        prompts = [self.job.prompts[at] for at in part or [0]]
        return self.generate(prompts, max_new_tokens)[: len(part)]


def answer_alone(job: Job, device: str) -> Answers:
    """Answer in this process, on "cpu" or "cuda"."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))  # a busy core would delay all others
    responder = Responder(job, Run(None))
    responder.model.to(device)
    return responder.answer()


def rank_body(group: Group, job: Job, runs: Sequence[Run]) -> list[Answers]:
    """What every rank of `weft eval` does: one run after another."""
    join(group)
    return [answer_on_ranks(group, job, run) for run in runs]


def join(group: Group) -> None:
    """Let transformers find the ranks of a group as it finds those of torchrun. Collective."""
    if group.device.type == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # it takes GPUs where it sees some
    else:
        os.environ["LOCAL_RANK"] = str(group.device.index)
    group.process_group()


def answer_on_ranks(
    group: Group, job: Job, run: Run, before: Callable[[Responder], None] | None = None
) -> Answers:
    """Load, answer, and give everything back. Collective.

    before: called with what was loaded, before it answers.
    """
    responder = Responder(job, run, group)
    try:
        if before is not None:
            before(responder)
        return responder.answer()
    finally:
        plugin.close()
