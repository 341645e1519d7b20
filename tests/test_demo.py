"""The demo: a trained model on CPU ranks, heard and compared; and a verdict that can be bad."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from weft.cli import demo, demo_report
from weft.errors import InvalidArgument

pytest.importorskip("transformers", minversion="5.23")


@pytest.fixture(scope="module")
def played():
    """One run on two processes: the plan, what was heard, and the verdict."""
    heard: list[dict[str, object]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "QUESTIONS", 5)
        plan = demo.plan_of(2, "cpu", None)
    return plan, heard, demo.run(plan, heard.append)


@pytest.mark.slow
def test_demo_is_right(played):
    plan, _, verdict = played
    assert verdict.right
    assert [(row.exchange, row.own_batches, row.ranks) for row in verdict.table] == [
        ("none", False, 1),
        ("all_reduce", False, 2),
        ("all_to_all", True, 2),
        ("weft", True, 2),
    ]
    assert {(row.right, row.invalid, row.equal, row.tokens) for row in verdict.table} == {
        (5, 0, 5, verdict.table[0].tokens)
    }
    assert plan.job.dtype == "fp32"


@pytest.mark.slow
def test_demo_is_heard_token_by_token(played):
    plan, heard, verdict = played
    for rank in range(2):
        texts = [str(told["text"]) for told in heard if told["rank"] == rank and "text" in told]
        assert len(texts) > 20
        assert all(
            after.startswith(before) for before, after in zip(texts, texts[1:], strict=False)
        )
        assert texts[-1].strip() == plan.asked[rank].answer
    loading = [told["loading"] for told in heard if told["rank"] == 0 and "loading" in told]
    assert loading == ["weft", "all_reduce", "all_to_all", None]
    assert verdict.row_bytes == 128 * 4
    # Three layers; both ranks call until the longer answer ends.
    assert verdict.tokens[0] % 3 == verdict.tokens[1] % 3 == 0
    for rank, tokens in enumerate(verdict.tokens):
        asked = len(plan.asked[rank].prompt) + len(plan.asked[rank].answer)
        assert tokens >= 3 * asked
        assert 0 < int(verdict.rows[rank].max()) <= tokens
        assert int(verdict.rows[rank].sum()) > tokens, "four experts are seldom on one rank"


@pytest.mark.slow
def test_demo_shows_and_draws(played, tmp_path):
    plan, heard, verdict = played
    file = io.StringIO()
    console = Console(file=file, width=110)
    demo_report.print_title(console, plan)
    with demo_report.shown(console, plan) as listener:
        for told in heard:
            listener(told)
    demo_report.print_verdict(console, verdict)
    for piece in (
        *("2 ranks (cpu)", "rank 1", plan.asked[1].answer, "5 of 5", "100.0%"),
        *("one process", "all_reduce", "all_to_all", "weft"),
        "right  all texts equal",
    ):
        assert piece in file.getvalue()
    demo_report.save_picture(tmp_path / "sub" / "demo.png", verdict)
    assert (tmp_path / "sub" / "demo.png").read_bytes().startswith(b"\x89PNG")
    table = [*verdict.table[:-1], replace(verdict.table[-1], equal=4)]
    worse = replace(verdict, table=table)
    assert not worse.right
    demo_report.print_verdict(console, worse)
    assert "WRONG  texts DIFFER: weft" in file.getvalue()


@pytest.mark.slow
def test_the_command_ends_as_the_verdict_says(played, weft_command, monkeypatch, tmp_path):
    plan, heard, verdict = played
    asked = []

    def plan_of(*given):
        asked.append(given)
        return plan

    def run(_, listener):
        for told in heard:
            listener(told)
        return verdict

    monkeypatch.setattr(demo, "plan_of", plan_of)
    monkeypatch.setattr(demo, "run", run)
    target = tmp_path / "demo.png"
    options = ("--ranks", "2", "--device", "cpu", "--checkpoint", str(tmp_path))
    code, out, err = weft_command("demo", *options, "--plot", str(target))
    assert (code, err) == (0, "")
    assert out.count(plan.asked[0].answer) == 1
    assert "right" in out
    assert target.exists()
    assert asked == [(2, "cpu", tmp_path)]
    verdict = replace(verdict, table=[replace(row, equal=0) for row in verdict.table])
    code, out, _ = weft_command("demo", *options)
    assert code == 1
    assert "WRONG" in out


def test_the_wire_hands_over_every_line():
    from weft.cli.demo_ranks import Wire

    heard: list[dict[str, object]] = []
    with demo._listening(heard.append) as path:
        wires = [Wire(path, rank) for rank in range(2)]
        for number in range(50):
            wires[number % 2].tell(text=f"\n{number} é")
        for wire in wires:
            wire.close()
    assert heard == [{"rank": n % 2, "text": f"\n{n} é"} for n in range(50)]
    assert not path.exists()
    with pytest.raises(ZeroDivisionError), demo._listening(heard.append):
        raise ZeroDivisionError


def test_refusals(monkeypatch, tmp_path):
    for ranks in (1, 3, 5):
        with pytest.raises(InvalidArgument, match=f"--ranks is {ranks}"):
            demo.plan_of(ranks, "cpu", None)
    with pytest.raises(InvalidArgument, match="has no config.json"):
        demo.plan_of(2, "cpu", tmp_path)
    monkeypatch.setattr(demo, "CHECKPOINT", tmp_path / "none")
    with pytest.raises(InvalidArgument, match="name a folder with --checkpoint"):
        demo.plan_of(2, "cpu", None)


@pytest.mark.parametrize(("gpus", "ranks"), [(8, 4), (4, 4), (3, 2), (2, 2)])
def test_ranks_of_gpus(monkeypatch, gpus, ranks):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert demo.device_of("auto") == "cuda"
    assert demo.plan_of(0, "cuda", None).ranks == ranks
    if ranks < 4:
        with pytest.raises(InvalidArgument, match=f"room for {gpus}"):
            demo.plan_of(4, "cuda", None)


def test_one_gpu_is_too_few(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert demo.device_of("auto") == "cpu"
    with pytest.raises(InvalidArgument, match="--ranks is not given; --device cuda has room for 1"):
        demo.plan_of(0, demo.device_of("cuda"), None)


def test_questions_are_those_of_the_checkpoint():
    plan = demo.plan_of(0, "cpu", None)
    lines = (demo.CHECKPOINT / "questions.jsonl").read_text().splitlines()
    assert [each.question for each in plan.asked] == [
        json.loads(line)["question"] for line in lines[3:203]
    ]
    assert (plan.ranks, plan.job.batch) == (4, 200)
