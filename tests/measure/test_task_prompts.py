"""Task prompts: different, repeatable, filled, none of them a prompt of the bench."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_specgen.cli.session import PromptFlags, choose_prompts
from hf_specgen.errors import SpecGenError
from hf_specgen.measure.prompts import own_prompts
from hf_specgen.measure.task_prompts import task_prompts


def test_prompts_are_different_filled_and_of_every_category() -> None:
    prompts = task_prompts(1500, seed=3)
    texts = [prompt.text for prompt in prompts]
    assert len(set(texts)) == 1500 and not any("{" in text or "}" in text for text in texts)
    counts = {category: 0 for category in ("coding", "math_reasoning", "qa", "translation", "writing")}
    for prompt in prompts:
        counts[prompt.category] += 1
    assert set(counts.values()) == {300}
    assert not set(texts) & {prompt.text for prompt in own_prompts()}


def test_the_same_seed_gives_the_same_prompts() -> None:
    first, again, other = task_prompts(40, 1), task_prompts(40, 1), task_prompts(40, 2)
    assert first == again and first != other
    assert task_prompts(60, 1)[:40] == first


def test_a_category_that_ran_out_leaves_the_others_going() -> None:
    prompts = task_prompts(5000)
    coding = sum(prompt.category == "coding" for prompt in prompts)
    assert len(prompts) == 5000 and 400 < coding < 1000


def test_more_than_there_are_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"forms": {"qa": ["What is {topic}?"]}, "fills": {"topic": ["salt"]}}
    monkeypatch.setattr("json.loads", lambda text: data)
    assert task_prompts(1)[0].text == "What is salt?"
    with pytest.raises(SpecGenError, match="1 exist"):
        task_prompts(2)


def test_the_bench_takes_tasks_that_no_drafter_saw() -> None:
    trained, held_out = task_prompts(50, 1), choose_prompts(PromptFlags(tasks=10, seed=1, skip=50), None, None)
    assert {prompt.text for prompt in held_out} == {prompt.text for prompt in task_prompts(60, 1)[50:]}
    assert len(held_out) == 10 and not {prompt.text for prompt in held_out} & {prompt.text for prompt in trained}
    some = choose_prompts(PromptFlags(tasks=10, seed=1, skip=50), "coding,qa", 3)
    assert (
        {prompt.category for prompt in some} == {"coding", "qa"} and len(some) == 3 and all(p in held_out for p in some)
    )
    assert choose_prompts(PromptFlags(), None, None) == own_prompts()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (PromptFlags(skip=3), "give that too"),
        (PromptFlags(seed=3), "give that too"),
        (PromptFlags(Path("p.txt"), tasks=3), "one of them"),
    ],
)
def test_prompt_flags_that_contradict_each_other_are_refused(flags: PromptFlags, said: str) -> None:
    with pytest.raises(SpecGenError, match=said):
        choose_prompts(flags, None, None)
