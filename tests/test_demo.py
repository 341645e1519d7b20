# SPDX-License-Identifier: Apache-2.0
"""The demo: a trained model on CPU ranks, its comparison, failing verdicts and refusals."""

from dataclasses import replace

import pytest
import torch

from weft.cli import demo, demo_kill
from weft.errors import InvalidArgument

transformers = pytest.importorskip("transformers", minversion="5.23")
ASKED = demo.read_questions(demo.CHECKPOINT / "questions.jsonl")


def _answers(texts: list[str]) -> demo.Answers:
    return demo.Answers(texts, tokens=10, seconds=2.0)


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
        ("--ranks 2 --kill 2", "kill is 2"),
        *((f"--ranks {n}", f"runs on 2 or 4 ranks; --ranks is {n}, ") for n in (0, 1, 3, -1)),
    ],
)
def test_invalid_hosts_and_ranks_are_refused(weft_command, words, text):
    code, out, err = weft_command("demo", "--device", "cpu", *words.split())
    assert (code, text in " ".join(err.split())) == (2, True), out + err


def test_the_command_ends_as_the_verdict_says(weft_command, monkeypatch):
    texts = [" " + each.answer for each in ASKED[:3]]
    ranks = [_answers(texts[::2]), _answers(texts[1::2])]
    verdict = demo.DemoResult(ASKED[:3], _answers(texts), ranks)
    monkeypatch.setattr(demo, "run", lambda ranks, device, hosts: verdict)
    result = demo_kill.SurvivorResult(dict(enumerate(texts)), 9, 4, texts[0][:5], (1,), 0.02, 0.1)
    outcome = demo_kill.KillDemoResult(ASKED[:3], _answers(texts), [result, None])
    monkeypatch.setattr(demo_kill, "run", lambda ranks, device, victim: outcome)

    def assert_ends(code: int, word: str, *options: str) -> None:
        ended, out, err = weft_command("demo", "--ranks", "2", "--device", "cpu", *options)
        assert (ended, err) == (code, "")
        assert word in out

    assert_ends(0, "3 of 3")
    assert_ends(0, "3 of 3", "--kill", "1")
    verdict = replace(verdict, ranks=[ranks[0], replace(ranks[1], texts=["42 #### 42"])])
    assert_ends(1, "WRONG")
    for bad in (replace(result, dead=(0, 1)), replace(result, texts={0: texts[1]})):
        outcome = replace(outcome, ranks=[bad, None])
        assert_ends(1, "WRONG", "--kill", "1")


def test_sentences_are_written_as_transformers_writes_them():
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
