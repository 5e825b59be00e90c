"""The helper that splits a product of options into fast and slow cases loses none of them."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from tiny import few, some

AXES = [("ab", (1, 2, 3)), ("abcdef", (1, 2, 3), "xyz"), ("ab", "cd", "ef", "gh"), ("abc",)]


def met(cases: list[tuple], places: int) -> set[tuple]:
    return {(at, tuple(case[i] for i in at)) for case in cases for at in combinations(range(len(case)), places)}


@pytest.mark.parametrize("axes", AXES, ids=len)
def test_every_two_options_meet_in_a_fast_case(axes: tuple) -> None:
    found, whole = some(*axes, fast=[tuple(axis[-1] for axis in axes)]), list(product(*axes))
    slow = [case.values for case in found if type(case) is not tuple and case.marks[0].name == "slow"]
    fast = [case for case in found if type(case) is tuple]
    assert sorted([*fast, *slow]) == whole, "each case once"
    assert whole[-1] in fast
    assert met(fast, max(1, min(2, len(axes) - 1))) == met(whole, max(1, min(2, len(axes) - 1)))
    assert len(fast) < len(whole) or len(axes) == 1


def test_cases_that_are_not_named_are_slow_and_none_is_lost() -> None:
    first, named, last = few(("plain", ("pair", 2), [3]), ("pair", 2))
    assert named == ("pair", 2)
    assert [case.values for case in (first, last)] == [("plain",), ([3],)]
    assert all(case.marks[0].name == "slow" for case in (first, last))
    with pytest.raises(ValueError, match="no such cases"):
        few("ab", "a", "c")
