"""Task prompts: different, repeatable, filled, none of them a prompt of the bench."""

from __future__ import annotations

import pytest

from hf_specgen.bench.prompts import own_prompts
from hf_specgen.bench.task_prompts import task_prompts
from hf_specgen.errors import SpecGenError


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
