"""Make thousands of everyday prompts from forms and fills, to train drafters on; the bench's own prompts are others."""

from __future__ import annotations

import json
import random
import re
from importlib import resources

from hf_specgen.errors import SpecGenError
from hf_specgen.measure.prompts import ChatPrompt

_SLOT = re.compile(r"\{(\w+)\}")
_NUMBERS = {"small": (2, 12), "number": (5, 95), "large": (100, 900), "percent": (5, 60)}
_TRIES = 200


def task_prompts(count: int, seed: int = 0) -> list[ChatPrompt]:
    """Return ``count`` different prompts, the five categories in turn; the same seed gives the same prompts.

    A category that has nothing new to say drops out. Raises: ``SpecGenError`` when all have.
    """
    source = resources.files("hf_specgen.measure") / "data" / "tasks.json"
    data = json.loads(source.read_text(encoding="utf-8"))
    forms: dict[str, list[str]] = data["forms"]
    chance = random.Random(seed)
    categories = sorted(forms)
    seen: set[str] = set()
    prompts: list[ChatPrompt] = []
    while len(prompts) < count:
        if not categories:
            raise SpecGenError(f"{count} different task prompts were asked for, {len(prompts)} exist: ask for fewer.")
        category = categories[len(prompts) % len(categories)]
        tries = (_filled(chance.choice(forms[category]), data["fills"], chance) for _ in range(_TRIES))
        text = next((text for text in tries if text not in seen), None)
        if text is None:
            categories.remove(category)
            continue
        seen.add(text)
        prompts.append(ChatPrompt.user(text, category, f"{category}-task-{len(prompts)}"))
    return prompts


def _filled(form: str, fills: dict[str, list[str]], chance: random.Random) -> str:
    """Fill every slot; what fills one slot may hold slots itself. A value is not used twice in one form."""
    used: set[str] = set()

    def fill(match: re.Match[str]) -> str:
        slot = match[1]
        if slot in _NUMBERS:
            return str(chance.randint(*_NUMBERS[slot]))
        value = chance.choice([word for word in fills[slot] if word not in used] or fills[slot])
        used.add(value)
        return _SLOT.sub(fill, value)

    return _SLOT.sub(fill, form)
