"""`weft eval`: questions, prompts and grading; and a checkpoint that answers on CPU ranks."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from weft.cli import eval as cli_eval
from weft.cli.demo import CHECKPOINT
from weft.cli.eval_job import Answers, Job, Run, texts_of
from weft.cli.gsm8k import Question, final_number, prompts, read_questions
from weft.errors import InvalidArgument

FIRST = Question("1+2-3=", "1+2=3. 3-3=0. #### 0")
SECOND = Question("Ann has 1,000 eggs and finds 6.", "1,000 + 6 = <<1000+6=1006>>1,006\n#### 1,006")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (" 48+27=75. 75-13=62. #### 62", "62"),
        ("#### 62\n\nQuestion: 1+1=\nAnswer: #### 2", "62"),
        ("so 7 of 9 #### $1,234.50 left", "1234.50"),
        ("#### -5", "-5"),
        ("75-13", "13"),
        ("the answer is 1,000.", "1000"),
        ("first #### 3, then #### 4", "4"),
        ("it is 8 ####", "8"),
        ("none", None),
        ("", None),
    ],
)
def test_the_final_number(text, number):
    assert final_number(text) == (None if number is None else Decimal(number))


def test_prompts():
    assert SECOND.is_right("1000 and 6 make 1006")
    assert not SECOND.is_right("1007")
    assert not SECOND.is_right("")
    assert prompts([SECOND], [FIRST]) == [
        "Question: 1+2-3=\nAnswer: 1+2=3. 3-3=0. #### 0\n\n"
        "Question: Ann has 1,000 eggs and finds 6.\nAnswer:"
    ]


def test_reading_questions(tmp_path):
    file = tmp_path / "q.jsonl"
    lines = [{"question": each.question, "answer": each.answer} for each in (FIRST, SECOND)]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert read_questions(file) == [FIRST, SECOND]
    for line, text in (
        ("{", "no JSON"),
        ("[1]", 'needs the texts "question" and "answer"'),
        ('{"question": "1+1="}', 'needs the texts "question" and "answer"'),
        ('{"question": "1+1=", "answer": "2"}', "does not end in #### N"),
        ('{"question": "1+1=", "answer": "2 ####"}', "does not end in #### N"),
    ):
        file.write_text(f"{json.dumps(lines[0])}\n{line}\n")
        with pytest.raises(InvalidArgument, match=f"q.jsonl:2.*{text}"):
            read_questions(file)
    with pytest.raises(InvalidArgument, match="cannot read questions"):
        read_questions(tmp_path)


def test_every_prompt_is_answered_once():
    for count, batch, ranks in ((7, 4, 2), (5, 2, 4), (1, 8, 3), (12, 4, 4)):
        job = Job(Path(), tuple(map(str, range(count))), batch, 1, None)
        parts = [job.parts(rank, ranks) for rank in range(ranks)]
        assert len({len(each) for each in parts}) == 1, "as many batches on every rank"
        assert sorted(at for each in parts for part in each for at in part) == list(range(count))
        for of_ranks in zip(*parts, strict=True):
            assert max(map(len, of_ranks)) - min(map(len, of_ranks)) <= 1
        mine = [
            Answers(tuple(job.prompts[at] for part in each for at in part), 1, 1.0)
            for each in parts
        ]
        assert texts_of(job, Run("weft", True), mine) == [[text] for text in job.prompts]


@pytest.fixture
def plan():
    return cli_eval.Plan.of(
        CHECKPOINT, [Run(None), Run("weft")], device="cpu", questions=2, shots=1
    )


def test_rows_count_what_differs(plan):
    right = tuple(question.answer for question in plan.asked)
    alone, wrong = Answers(right, 50, 2.0), Answers((right[0], "none"), 40, 3.0)
    first, second = cli_eval.rows_of(plan, [(Run(None), [alone]), (Run("weft"), [alone, wrong])])
    assert (first.right, first.invalid, first.equal, first.accuracy) == (2, 0, 2, 1.0)
    assert (second.right, second.equal) == (2, 1), "one rank of two made another text"
    assert (second.tokens, second.seconds, second.ranks) == (50, 3.0, 2)
    (first,) = cli_eval.rows_of(plan, [(Run("weft"), [wrong, wrong])])
    assert (first.right, first.invalid, first.equal) == (1, 1, 2)
    halves = [Answers(right[:1], 20, 1.0), Answers(("none",), 25, 1.5)]
    own = cli_eval.rows_of(plan, [(Run(None), [alone]), (Run("weft", True), halves)])[1]
    assert (own.right, own.invalid, own.equal, own.tokens) == (1, 1, 1, 45)
    assert own.own_batches


def test_the_dtype(plan):
    for given, device, wanted in (
        ("auto", "cuda", None),
        ("auto", "cpu", "fp32"),
        ("bf16", "cpu", "bf16"),
    ):
        of = cli_eval.Plan.of(CHECKPOINT, plan.runs, device=device, dtype=given, ranks=2)
        assert (of.job.dtype, of.ranks) == (wanted, 2)
    assert plan.ranks == 4


REFUSED = {
    "exchange": (("--exchange", "none,fast"), "--exchange has 'fast'"),
    "no exchange": (("--exchange", ","), "--exchange is empty"),
    "own": (("--exchange", "all_reduce", "--own-batches"), "whose ranks share one batch"),
    "dtype": (("--dtype", "fp8"), "--dtype is 'fp8'"),
    "device": (("--device", "tpu"), "device is 'tpu'"),
    "data": (("--data", "/no/such/file"), "cannot read questions from /no/such/file"),
    "many": (("--questions", "206"), "has 208 questions, and 3 examples and 206 questions"),
    "json": (("--json", "/proc/no/e.json"), "cannot write /proc/no/e.json"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_come_before_any_rank(weft_command, monkeypatch, name):
    monkeypatch.setattr(cli_eval, "launch", None)
    options, text = REFUSED[name]
    device = () if "--device" in options else ("--device", "cpu")
    code, out, err = weft_command("eval", str(CHECKPOINT), *options, *device)
    assert (code, out) == (2, "")
    assert text in " ".join(err.split())
    assert "Traceback" not in err


def test_what_is_no_checkpoint(weft_command, tmp_path):
    code, _, err = weft_command("eval", str(tmp_path))
    assert code == 2
    assert "it has no config.json" in " ".join(err.split())
    (tmp_path / "config.json").write_text("{}")
    code, _, err = weft_command("eval", str(tmp_path))
    assert code == 2
    assert "name a file in GSM8K's form with --data" in " ".join(err.split())


def test_packages_are_named(weft_command, monkeypatch):
    find = importlib.util.find_spec
    for absent in ("transformers", "accelerate", "safetensors"):
        with monkeypatch.context() as patch:
            patch.setattr(
                importlib.util, "find_spec", lambda m, a=absent: m != a and find(m) or None
            )
            for command in (("eval", str(CHECKPOINT)), ("demo",)):
                code, _, err = weft_command(*command)
                assert code == 2
                assert f"{absent}, which is not installed" in " ".join(err.split())
                assert "pip install 'weft[transformers]'" in " ".join(err.split())
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "5.17.0")
    code, _, err = weft_command("eval", str(CHECKPOINT))
    assert code == 2
    assert "transformers is 5.17.0; checkpoints need 5.23 or newer" in " ".join(err.split())


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("own", [False, True], ids=["shared batch", "own batches"])
def test_a_checkpoint_answers_on_ranks(weft_command, tmp_path, own, device):
    """Three questions in batches of two: one of two ranks has none in the last, if they part."""
    pytest.importorskip("transformers", minversion="5.23")
    file = tmp_path / "deep" / "eval.json"
    names = ["none", "weft"]
    code, out, err = weft_command(
        *("eval", str(CHECKPOINT), "--exchange", ",".join(names), "--device", device),
        *("--ranks", "2", "--questions", "3", "--batch", "2"),
        *("--dtype", "fp32", "--json", str(file)),
        *(["--own-batches"] if own else []),
    )
    assert (code, err) == (0, "weft: 1 of 2: one process\nweft: 2 of 2: 2 ranks: weft\n")
    assert out.count("100.0%") == len(names)
    assert out.count("3 of 3") == len(names) - 1
    data = json.loads(file.read_text())
    assert [row["exchange"] for row in data["rows"]] == names
    assert data["dtype"] == "fp32"
    first = data["rows"][0]
    assert first["tokens"] > 60
    for row in data["rows"]:
        assert (row["right"], row["invalid"], row["equal"], row["accuracy"]) == (3, 0, 3, 1.0)
        assert row["tokens"] == first["tokens"]
        assert row["seconds"] > 0
        assert row["ranks"] == (1 if row is first else 2)
        assert row["own_batches"] == (own and row is not first)


def test_a_table_shows_what_differs(plan):
    from rich.console import Console

    row = cli_eval.rows_of(plan, [(Run(None), [Answers(("1", "2"), 5, 2.0)])])[0]
    console = Console(width=120, record=True)
    cli_eval.print_rows(console, [row, replace(row, exchange="weft", ranks=2, equal=1)])
    text = console.export_text()
    assert "one process" in text
    assert "1 of 2" in text
