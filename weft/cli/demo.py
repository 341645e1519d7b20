# SPDX-License-Identifier: Apache-2.0
"""`weft demo`: compares a trained mixture of experts on several ranks with one process."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.arguments import check_int
from weft.cli.namespaces import ADDRESS, Namespaces, can_create, enter
from weft.cli.options import chosen_device
from weft.distribution import install_hint
from weft.errors import InvalidArgument
from weft.group import Group
from weft.launcher import launch

CHECKPOINT = Path(__file__).with_name("checkpoint")
RANKS = (2, 4)  # divisors of the checkpoint's heads and experts
QUESTIONS = 200
NEW_TOKENS = 48
OLDEST = (5, 23)  # transformers version that introduced expert-parallel implementations
PORT = 29572  # port of the store, in the first host's namespace
LATE = 600.0  # timeout of layers in seconds: a machine may be slow to read or compile


@dataclass(frozen=True, slots=True)
class Question:
    """A question and its worked answer, which ends in `#### N`."""

    question: str
    answer: str

    @property
    def prompt(self) -> str:
        """The prompt: the question without its answer."""
        return f"Question: {self.question}\nAnswer:"

    def is_right(self, text: str) -> bool:
        """Whether a generated text ends in the expected number."""
        return "####" in text and text.split("####")[-1].split() == self.answer.split()[-1:]


def read_questions(path: Path) -> list[Question]:
    """Read the questions of a JSONL file with "question" and "answer" on every line."""
    return [Question(**json.loads(line)) for line in path.read_text().splitlines()]


@dataclass(frozen=True, slots=True)
class Answers:
    """Texts that one rank, or one process, generated.

    Attributes:
        texts: One per question.
        tokens: Number of generated tokens.
        seconds: Total time.
    """

    texts: list[str]
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of the demo: `alone` is one process, `ranks` has each rank's part of the questions.

    Rank r of n answers questions r, r + n, r + 2n and so on.
    """

    questions: list[Question]
    alone: Answers
    ranks: list[Answers]

    @property
    def texts(self) -> list[str]:
        """The ranks' texts in the order of the questions."""
        size = len(self.ranks)
        return [self.ranks[i % size].texts[i // size] for i in range(len(self.questions))]

    @property
    def equal(self) -> int:
        """Number of the ranks' texts that are identical to those of one process."""
        return sum(a == b for a, b in zip(self.texts, self.alone.texts, strict=True))


def validate_ranks(ranks: int | None, device: str) -> tuple[int, str]:
    """Validate the number of ranks (None: 4, or fewer GPUs), and the device; return both.

    "auto" selects GPUs only if there are several. Raises InvalidArgument for an unsupported number
    of ranks, and for missing GPUs or packages.
    """
    fix = install_hint("transformers")
    for name in ("transformers", "accelerate", "safetensors"):
        if importlib.util.find_spec(name) is None:
            raise InvalidArgument(f"the demo needs {name}, which is not installed: {fix}")
    version = importlib.metadata.version("transformers")
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise InvalidArgument(f"transformers is {version}; the demo needs {oldest} or newer: {fix}")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device_type = "cpu" if device == "auto" and gpus < min(RANKS) else chosen_device(device)
    most = gpus if device_type == "cuda" else max(RANKS)
    supported = [each for each in RANKS if each <= most]
    count = max(supported, default=0) if ranks is None else ranks
    if count not in supported:
        raise InvalidArgument(
            f"the demo runs on {' or '.join(map(str, RANKS))} ranks; --ranks is "
            f"{'not given' if ranks is None else ranks}, and --device {device_type} supports at "
            f"most {most}: choose others, or --device cpu"
        )
    return count, device_type


def check_hosts(hosts: int, ranks: int, *, kill: bool) -> None:
    """Raise InvalidArgument for hosts of unequal size, and for --kill with several hosts."""
    check_int("hosts", hosts, 1, ranks)
    if ranks % hosts:
        raise InvalidArgument(
            f"--hosts is {hosts} with {ranks} ranks, but hosts must be of equal size: choose a "
            "divisor"
        )
    if hosts > 1 and kill:
        raise InvalidArgument(
            f"--kill with --hosts {hosts}: recovery from a dead rank works within one host only; "
            "leave one of the two out"
        )


def uses_namespaces(hosts: int, device: str) -> bool:
    """Whether hosts get their own network namespaces, which this machine must allow.

    GPUs of one machine communicate without the network.
    """
    return hosts > 1 and device == "cpu" and can_create()


def run(ranks: int, device: str, questions: int = QUESTIONS, *, hosts: int = 1) -> Verdict:
    """Answer the questions on ranks, then in this process. Raises errors of `weft.launch`.

    `hosts` is the number of hosts that ranks are split into; between hosts, rows are sent by
    torch.distributed.
    """
    selected = read_questions(CHECKPOINT / "questions.jsonl")[:questions]
    with Namespaces(hosts) if uses_namespaces(hosts, device) else nullcontext() as network:
        names = [] if network is None else [network.of(host) for host in range(hosts)]
        if names:  # torch logs a warning for every connection to an address without a name
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        parts = launch(rank_body, selected, hosts, names, ranks=ranks, device=device, timeout=3600)
    return Verdict(selected, answer_alone(selected, device), parts)


def answer_alone(questions: list[Question], device: str) -> Answers:
    """Answer all questions in this process."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))  # leave cores to other processes
    return _answers(load_model().to(device), questions)


def rank_body(
    group: Group, questions: list[Question], hosts: int = 1, names: Sequence[str] = ()
) -> Answers:
    """Load this rank's share of the model, and answer its part of the questions.

    `names` are the hosts' network namespaces, if they have any.
    """
    from transformers.distributed import DistributedConfig

    from weft.plugins import transformers as plugin

    # transformers reads torchrun's variables, and uses GPUs if it sees any.
    os.environ |= (
        {"CUDA_VISIBLE_DEVICES": ""}
        if group.device.type == "cpu"
        else {"LOCAL_RANK": str(group.device.index)}
    )
    host = group.rank * hosts // group.size
    if hosts > 1:
        os.environ["WEFT_HOST"] = f"host-{host}"
    if names:
        enter(names[host])
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        dist.init_process_group(
            "gloo",
            f"tcp://{ADDRESS.format(1)}:{PORT}",
            timeout=timedelta(seconds=LATE),
            rank=group.rank,
            world_size=group.size,
        )
    else:
        group.process_group()
    plugin.register(timeout=LATE)
    config = DistributedConfig(fsdp_size=group.size, ep_size=group.size, ep_implementation="weft")
    try:
        return _answers(load_model(distributed_config=config), questions, group)
    finally:
        plugin.close()
        if names:
            dist.destroy_process_group()


def load_model(**options: Any) -> Any:
    """Load the checkpoint's model in float32, without log output."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    options |= {"local_files_only": True, "use_safetensors": True, "dtype": torch.float32}
    return transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT, **options).eval()


def _answers(model: Any, questions: list[Question], group: Group | None = None) -> Answers:
    """Answer this rank's part of the questions greedily, or all of them. Collective on ranks."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT, local_files_only=True)
    part = questions if group is None else questions[group.rank :: group.size]

    def generate(questions: list[Question], most: int = NEW_TOKENS) -> list[list[int]]:
        prompts = [each.prompt for each in questions]
        batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        with torch.no_grad():  # FSDP cannot keep gathered weights under inference_mode
            out = model.generate(
                **batch.to(model.device),
                max_new_tokens=most,
                do_sample=False,
                synced_gpus=group
                is not None,  # finished ranks must continue, because others need them
            )
        new = out[:, batch["input_ids"].shape[1] :].tolist()
        return [[token for token in row if token != tokenizer.pad_token_id] for row in new]

    generate(part[:1], 2)  # compile and allocate
    if group is not None:
        group.barrier(timeout=LATE)
    start = time.perf_counter()
    rows = generate(part)
    return Answers(
        texts=tokenizer.batch_decode(rows, skip_special_tokens=True),
        tokens=sum(map(len, rows)),
        seconds=time.perf_counter() - start,
    )


def show(console: Console, verdict: Verdict) -> bool:
    """Print answers and a comparison of the texts; return whether all are identical."""
    write = partial(console.print, highlight=False)
    count, ranks = len(verdict.questions), len(verdict.ranks)
    write("Each rank answers a question with experts of all ranks; weft sends the tokens:\n")
    for rank, each in enumerate(verdict.ranks):
        question, text = verdict.questions[rank].question, each.texts[0].strip()
        write(Text.assemble((f"rank {rank}  ", "dim"), f"{question}  ", (text, "bold")))
    write(f"\n{count} questions that were not in the training data:")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("", "right", "tokens/s", "seconds", "equal texts"):
        table.add_column(name, justify="left" if not name else "right")
    for name, parts, texts, equal in (
        ("one process", [verdict.alone], verdict.alone.texts, ""),
        (f"weft, {ranks} ranks", verdict.ranks, verdict.texts, f"{verdict.equal} of {count}"),
    ):
        right = sum(q.is_right(text) for q, text in zip(verdict.questions, texts, strict=True))
        seconds = max(each.seconds for each in parts)
        rate = sum(each.tokens for each in parts) / seconds
        table.add_row(name, f"{right} of {count}", f"{rate:.0f}", f"{seconds:.1f}", equal)
    write(table)
    identical = verdict.equal == count
    mark = ("right  ", "bold green") if identical else ("WRONG  ", "bold red")
    write(Text.assemble(mark, "all texts are identical" if identical else "texts DIFFER"))
    return identical
