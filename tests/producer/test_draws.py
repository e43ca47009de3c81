"""Draws are told apart, and found again."""

from __future__ import annotations

from typing import Any

from turnmill.draws import Draws
from turnmill.turn import Turn


def turn(content: str = "Hello", **sampling: Any) -> Turn:
    messages = [{"role": "user", "content": content}]
    return Turn.model_validate({"model": "m", "messages": messages, "sampling": sampling})


def draws(
    run: str = "run", conversation: str = "c", epoch: int = 0, seed: int | None = None
) -> Draws:
    return Draws(run, conversation, epoch, seed)


def test_the_same_ask_is_a_new_draw_each_time() -> None:
    of_one = draws()
    numbered = [of_one.numbered(turn()) for _ in range(100)]
    assert len({one.sample for one in numbered}) == 100
    assert len({one.hash for one in numbered}) == 100
    assert all(0 <= one.sample < 2**48 for one in numbered)


def test_a_resumed_run_finds_its_own_draws() -> None:
    asks = [turn("a"), turn("b"), turn("a"), turn("a", top_p=0.5)]
    first, second = draws(), draws()
    assert [first.numbered(one) for one in asks] == [second.numbered(one) for one in asks]


def test_what_else_is_asked_between_moves_no_draw() -> None:
    one, other = draws(), draws()
    other.numbered(turn("something else"))
    assert one.numbered(turn()) == other.numbered(turn())


def test_no_run_conversation_or_epoch_finds_another_s_draws() -> None:
    alike = [
        draws(),
        draws(run="run2"),
        draws(conversation="c2"),
        draws(epoch=1),
        draws(run="runc", conversation=""),
        draws(run=""),  # what runs share is not what a run has for itself
    ]
    assert len({one.numbered(turn()).sample for one in alike}) == len(alike)


def test_what_all_may_share_stays_as_it_is() -> None:
    for one in (turn(temperature=0), turn(temperature=1, seed=7)):
        assert draws().numbered(one) is one
        assert draws(seed=1).numbered(one) is one


def test_a_seed_makes_each_draw_repeatable() -> None:
    one, again = draws(seed=5), draws(seed=5)
    numbered = [one.numbered(turn(temperature=1)) for _ in range(10)]
    assert numbered == [again.numbered(turn(temperature=1)) for _ in range(10)]
    seeds = [turn.sampling.seed for turn in numbered]
    assert len(set(seeds)) == 10
    assert all(seed is not None and 0 <= seed < 2**31 for seed in seeds)
    assert draws(seed=6).numbered(turn(temperature=1)).sampling.seed not in seeds


def test_seeds_differ_by_epoch() -> None:
    seeds = {draws(seed=5, epoch=epoch).numbered(turn()).sampling.seed for epoch in range(10)}
    assert len(seeds) == 10


def test_numbers_stay_what_they_are() -> None:
    """What a run has stored is found by a later version, too."""
    assert draws().numbered(turn()).sample == PINNED_SAMPLE
    assert draws(seed=5).numbered(turn()).sampling.seed == PINNED_SEED


PINNED_SAMPLE = 69869171865322
PINNED_SEED = 713819627
