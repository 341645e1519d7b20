# SPDX-License-Identifier: Apache-2.0
"""The demo: a trained model on CPU ranks, its comparison, failing verdicts and refusals."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch

from weft.cli import demo, demo_kill
from weft.errors import InvalidArgument

transformers = pytest.importorskip("transformers", minversion="5.23")
ASKED = demo.read_questions(demo.CHECKPOINT / "questions.jsonl")


def _answers(texts: list[str]) -> demo.Answers:
    return demo.Answers(texts, tokens=10, seconds=2.0)


def _verdict() -> demo.DemoResult:
    """Return a verdict on three questions, all answered correctly by two ranks."""
    texts = [" " + each.answer for each in ASKED[:3]]
    ranks = [_answers(texts[::2]), _answers(texts[1::2])]
    return demo.DemoResult(ASKED[:3], _answers(texts), ranks)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 2])
def test_ranks_answer_as_one_process_does(hosts):
    verdict = demo.run(2, "cpu", 5, hosts=hosts)
    assert verdict.single_process.texts == [" " + each.answer + "\n" for each in ASKED[:5]]
    assert verdict.texts == verdict.single_process.texts
    assert [len(each.texts) for each in verdict.ranks] == [3, 2]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--hosts 2 --ranks 4 --kill 1", "remove one of the two"),
        ("--hosts 3 --ranks 4", "--hosts is 3 with 4 ranks"),
        ("--hosts 5 --ranks 4", "hosts is 5"),
        *((f"--ranks {n}", f"runs on 2 or 4 ranks; --ranks is {n}, ") for n in (0, 1, 3, -1)),
    ],
)
def test_invalid_hosts_and_ranks_are_refused(weft_command, words, text):
    code, out, err = weft_command("demo", "--device", "cpu", *words.split())
    assert (code, out) == (2, "")
    assert text in " ".join(err.split())


def test_the_command_ends_as_the_verdict_says(weft_command, monkeypatch):
    verdict = _verdict()
    monkeypatch.setattr(demo, "run", lambda ranks, device, hosts: verdict)
    code, out, err = weft_command("demo", "--ranks", "2", "--device", "cpu")
    assert (code, err) == (0, "")
    for piece in ("2 ranks (cpu)", ASKED[1].answer, "3 of 3", "right  all texts are identical"):
        assert piece in out
    other = replace(verdict.ranks[1], texts=["42 #### 42"])
    verdict = replace(verdict, ranks=[verdict.ranks[0], other])
    code, out, _ = weft_command("demo", "--ranks", "2", "--device", "cpu")
    assert code == 1
    for piece in ("2 of 3", "WRONG  texts DIFFER"):
        assert piece in out


@pytest.mark.parametrize("apart", [True, False])
def test_the_command_names_what_joins_its_hosts(weft_command, monkeypatch, apart):
    monkeypatch.setattr(demo, "run", lambda ranks, device, hosts: _verdict())
    monkeypatch.setattr(demo, "can_create_namespaces", lambda: apart)
    code, out, err = weft_command("demo", "--ranks", "2", "--device", "cpu", "--hosts", "2")
    assert (code, err) == (0, "")
    text = ("its loopback", "each have a network namespace, connected by veth")[apart]
    assert text in " ".join(out.split())


def test_sentences_are_written_as_transformers_writes_them():
    """And without arguments that the installed transformers warns of."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo.CHECKPOINT, local_files_only=True)
    sentences = demo_kill._Batch(tokenizer, [each.prompt for each in ASKED[:3]], demo.load_model())
    for step in range(demo.NEW_TOKENS + 2):
        if step == demo_kill.KILL_AFTER_TOKENS:
            sentences.truncate(step - 2)
        sentences.tokens.append(sentences.step())
    assert sentences.texts() == [" " + each.answer + "\n" for each in ASKED[:3]]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 3])
def test_survivors_continue_and_answer_for_the_dead(victim):
    outcome = demo_kill.run(4, "cpu", victim, 9)
    assert outcome.ranks[victim] is None
    assert (
        outcome.texts
        == outcome.single_process.texts
        == [" " + each.answer + "\n" for each in ASKED[:9]]
    )
    for survivor in outcome.living:
        assert survivor.dead == (victim,)
        assert demo_kill.KILL_AFTER_TOKENS - 1 <= survivor.kept_tokens <= demo.NEW_TOKENS
        assert 0 < survivor.recovery < survivor.pause


def test_the_kill_command_ends_as_the_outcome_says(weft_command, monkeypatch):
    texts = [" " + each.answer for each in ASKED[:3]]
    prefix = texts[0][:5]
    result = demo_kill.SurvivorResult(dict(enumerate(texts)), 9, 4, prefix, (1,), 0.02, 0.1)
    outcome = demo_kill.KillDemoResult(ASKED[:3], _answers(texts), [result, None])
    monkeypatch.setattr(demo_kill, "run", lambda ranks, device, victim: outcome)
    kill = ("demo", "--ranks", "2", "--device", "cpu", "--kill")
    code, out, err = weft_command(*kill, "1")
    assert (code, err) == (0, "")
    text = " ".join(out.split())
    for piece in ("[rank 1 is killed]", "after token 4", "in 20 ms", "token 100 ms", "3 of 3"):
        assert piece in text
    for bad in (replace(result, dead=(0, 1)), replace(result, texts={0: texts[1]})):
        outcome = replace(outcome, ranks=[bad, None])
        code, out, _ = weft_command(*kill, "1")
        assert code == 1
        assert "WRONG" in out
    code, out, err = weft_command(*kill, "2")
    assert (code, out.count("rank")) == (2, 1)
    assert "kill is 2" in " ".join(err.split())


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "5.22.1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(InvalidArgument, match=r"transformers is 5\.22\.1; the demo needs 5\.23"):
        demo.select_ranks(2, "cpu")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    text = r"needs transformers.*\[transformers\]'"
    with pytest.raises(InvalidArgument, match=text):
        demo.select_ranks(2, "cpu")


@pytest.mark.parametrize(
    ("gpus", "found"),
    [(8, (4, "cuda")), (4, (4, "cuda")), (3, (2, "cuda")), (2, (2, "cuda")), (1, (4, "cpu"))],
)
def test_ranks_of_gpus(monkeypatch, gpus, found):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert demo.select_ranks(None, "auto") == found
    if gpus < 4:
        with pytest.raises(InvalidArgument, match=f"--device cuda supports at most {gpus}"):
            demo.select_ranks(4, "cuda")


def test_only_the_final_number_counts():
    question = demo.Question("1+2+3=", "1+2=3. 3+3=6. #### 6")
    assert question.is_correct("1+2=4. 4+2=6. #### 6\n")
    for text in ("6", "#### 16", "#### 6 or 7", "#### 6. #### 7", ""):
        assert not question.is_correct(text)
