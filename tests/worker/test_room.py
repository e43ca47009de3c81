from __future__ import annotations

import pytest

from turnmill_worker.engines.base import NoRoom
from turnmill_worker.engines.room import Room, room


def test_what_is_asked_for_is_kept_where_it_fits():
    assert room(10, 50, context=60) == Room(50, "output", 50)


def test_more_than_is_left_is_cut_to_what_is_left():
    assert room(10, 51, context=60) == Room(50, "context", 60)


def test_without_a_wish_there_is_all_that_is_left():
    assert room(10, None, context=60) == Room(50, "context", 60)


def test_one_token_is_room_enough():
    assert room(59, 5, context=60) == Room(1, "context", 60)


@pytest.mark.parametrize("prompt", [60, 61])
def test_a_prompt_that_fills_the_context_has_no_room(prompt: int):
    with pytest.raises(NoRoom) as refused:
        room(prompt, 1, context=60)
    assert (refused.value.prompt_tokens, refused.value.limit) == (prompt, 60)


def test_a_limit_of_the_prompt_alone_comes_first():
    assert room(50, 5, context=60, max_prompt=50).max_tokens == 5
    with pytest.raises(NoRoom) as refused:
        room(51, 5, context=60, max_prompt=50)
    assert refused.value.limit == 50
