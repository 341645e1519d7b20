# SPDX-License-Identifier: Apache-2.0
"""`weft demo`: a trained mixture of experts answers on several ranks and in one process."""

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

from weft.arguments import integer
from weft.cli.namespaces import ADDRESS, Namespaces, allowed, enter
from weft.cli.options import chosen_device
from weft.distribution import install_hint
from weft.errors import InvalidArgument
from weft.group import Group
from weft.launcher import launch

CHECKPOINT = Path(__file__).with_name("checkpoint")
RANKS = (2, 4)  # that can share the checkpoint's heads and experts
QUESTIONS = 200
NEW_TOKENS = 48
OLDEST = (5, 23)  # of transformers: the first whose expert parallelism takes implementations
PORT = 29572  # of the store, in the first host's namespace
LATE = 600.0  # seconds that a layer waits for a peer: a machine may be slow to read or compile


@dataclass(frozen=True, slots=True)
class Question:
    """A question and its worked answer, which ends in `#### N`."""

    question: str
    answer: str

    @property
    def prompt(self) -> str:
        """The text before the answer."""
        return f"Question: {self.question}\nAnswer:"

    def is_right(self, text: str) -> bool:
        """Whether a generated text ends in this question's number."""
        return "####" in text and text.split("####")[-1].split() == self.answer.split()[-1:]


def read_questions(path: Path) -> list[Question]:
    """The questions of a JSONL file with "question" and "answer" in every line."""
    return [Question(**json.loads(line)) for line in path.read_text().splitlines()]


@dataclass(frozen=True, slots=True)
class Answers:
    """What one rank, or one process, generated.

    texts: one for each of its questions.  tokens: generated.  seconds: for all of them.
    """

    texts: list[str]
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """The whole demo: `alone` is one process, `ranks` has each rank's part of the same questions.

    Rank r of n answered questions r, r + n, r + 2n and so on.
    """

    asked: list[Question]
    alone: Answers
    ranks: list[Answers]

    @property
    def texts(self) -> list[str]:
        """What the ranks answered, in the order of the questions."""
        size = len(self.ranks)
        return [self.ranks[at % size].texts[at // size] for at in range(len(self.asked))]

    @property
    def equal(self) -> int:
        """Texts of the ranks that are identical to those of one process."""
        return sum(a == b for a, b in zip(self.texts, self.alone.texts, strict=True))


def checked(ranks: int | None, device: str) -> tuple[int, str]:
    """The number of ranks and the device, "cpu" or "cuda". ranks: None for 4, or fewer GPUs.

    "auto" takes GPUs only where there are several. Raises InvalidArgument where GPUs or packages
    are missing, and for another number of ranks.
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
    where = "cpu" if device == "auto" and gpus < min(RANKS) else chosen_device(device)
    most = gpus if where == "cuda" else max(RANKS)
    fits = [each for each in RANKS if each <= most]
    found = max(fits, default=0) if ranks is None else ranks
    if found not in fits:
        raise InvalidArgument(
            f"the demo runs on {' or '.join(map(str, RANKS))} ranks; --ranks is "
            f"{'not given' if ranks is None else ranks}, and --device {where} has room for {most}: "
            "choose others, or --device cpu"
        )
    return found, where


def check_hosts(hosts: int, ranks: int, *, kill: bool) -> None:
    """Raises InvalidArgument for hosts of unequal size, and for a death, which ends them all."""
    integer("hosts", hosts, 1, ranks)
    if ranks % hosts:
        raise InvalidArgument(
            f"--hosts is {hosts} with {ranks} ranks: every host has as many; choose a divisor"
        )
    if hosts > 1 and kill:
        raise InvalidArgument(
            f"--kill with --hosts {hosts}: ranks of one host go on without a dead one, several "
            "hosts do not; leave one of the two out"
        )


def linked(hosts: int, device: str) -> bool:
    """Do hosts get network namespaces of their own, where this machine lets them be made?

    GPUs of one machine reach each other past any network.
    """
    return hosts > 1 and device == "cpu" and allowed()


def run(ranks: int, device: str, questions: int = QUESTIONS, *, hosts: int = 1) -> Verdict:
    """Answer on ranks, then in this process. Raises what `weft.launch` raises.

    hosts: what the ranks are told apart as; between them rows travel by torch.distributed.
    """
    asked = read_questions(CHECKPOINT / "questions.jsonl")[:questions]
    with Namespaces(hosts) if linked(hosts, device) else nullcontext() as network:
        names = [] if network is None else [network.of(host) for host in range(hosts)]
        if names:  # torch warns of every connection that such addresses have no names
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        found = launch(rank_body, asked, hosts, names, ranks=ranks, device=device, timeout=3600)
    return Verdict(asked, answer_alone(asked, device), found)


def answer_alone(asked: list[Question], device: str) -> Answers:
    """Answer all questions in this process."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))  # a busy core would delay all others
    return _answers(load_model().to(device), asked)


def rank_body(
    group: Group, asked: list[Question], hosts: int = 1, names: Sequence[str] = ()
) -> Answers:
    """What every rank does: load its share of the model, answer its part of the questions.

    names: the network namespace of each host, where they have one.
    """
    from transformers.distributed import DistributedConfig

    from weft.plugins import transformers as plugin

    # transformers finds the ranks as it finds those of torchrun, and takes GPUs where it sees some.
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
        return _answers(load_model(distributed_config=config), asked, group)
    finally:
        plugin.close()
        if names:
            dist.destroy_process_group()


def load_model(**options: Any) -> Any:
    """The checkpoint's model in float32, quietly."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    options |= {"local_files_only": True, "use_safetensors": True, "dtype": torch.float32}
    return transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT, **options).eval()


def _answers(model: Any, asked: list[Question], group: Group | None = None) -> Answers:
    """Answer, greedily, this rank's part, or all of it. Collective on ranks."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT, local_files_only=True)
    mine = asked if group is None else asked[group.rank :: group.size]

    def generate(questions: list[Question], most: int = NEW_TOKENS) -> list[list[int]]:
        prompts = [each.prompt for each in questions]
        batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        with torch.no_grad():  # under inference_mode FSDP could not keep the weights it gathers
            out = model.generate(
                **batch.to(model.device),
                max_new_tokens=most,
                do_sample=False,
                synced_gpus=group is not None,  # a rank that is done goes on: others need it
            )
        new = out[:, batch["input_ids"].shape[1] :].tolist()
        return [[token for token in row if token != tokenizer.pad_token_id] for row in new]

    generate(mine[:1], 2)  # compiles and allocates
    if group is not None:
        group.barrier(timeout=LATE)
    start = time.perf_counter()
    rows = generate(mine)
    return Answers(
        texts=tokenizer.batch_decode(rows, skip_special_tokens=True),
        tokens=sum(map(len, rows)),
        seconds=time.perf_counter() - start,
    )


def show(console: Console, verdict: Verdict) -> bool:
    """Print answers and how the texts compare; return whether all agree."""
    say = partial(console.print, highlight=False)
    count, ranks = len(verdict.asked), len(verdict.ranks)
    say("Each rank answers a question by experts of all ranks; weft carries the tokens:\n")
    for rank, each in enumerate(verdict.ranks):
        question, text = verdict.asked[rank].question, each.texts[0].strip()
        say(Text.assemble((f"rank {rank}  ", "dim"), f"{question}  ", (text, "bold")))
    say(f"\n{count} questions that training never saw:")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("", "right", "tokens/s", "seconds", "equal texts"):
        table.add_column(name, justify="left" if not name else "right")
    for name, parts, texts, equal in (
        ("one process", [verdict.alone], verdict.alone.texts, ""),
        (f"weft, {ranks} ranks", verdict.ranks, verdict.texts, f"{verdict.equal} of {count}"),
    ):
        right = sum(q.is_right(text) for q, text in zip(verdict.asked, texts, strict=True))
        seconds = max(each.seconds for each in parts)
        rate = sum(each.tokens for each in parts) / seconds
        table.add_row(name, f"{right} of {count}", f"{rate:.0f}", f"{seconds:.1f}", equal)
    say(table)
    good = verdict.equal == count
    mark = ("right  ", "bold green") if good else ("WRONG  ", "bold red")
    say(Text.assemble(mark, "all texts are identical" if good else "texts DIFFER"))
    return good
