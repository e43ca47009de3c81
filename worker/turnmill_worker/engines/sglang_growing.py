"""Growing answers of SGLang: what is kept of them, and how one goes on from that. Like sglang.py, it follows one minor
version of SGLang; it imports nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from turnmill.turn import Turn
from turnmill_worker.engines.kept import Part, ends_whole, joined, settled
from turnmill_worker.engines.tokens import KeptToken, pack_tokens, unpack_tokens

_DECODE_CONTEXT = 5
"""Tokens before those that SGLang's detokenizer decodes."""

_REMEMBERS = (
    "min_new_tokens",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "stop_regex",
    "custom_params",
)


_TAIL = 8
"""Tokens: a character is made of no more."""


class Grown:
    """What there is of an unfinished answer: tokens taken over from an earlier try, and their text; and those made since.
    Written on the loop thread, read on the worker's."""

    def __init__(self) -> None:
        self.before: list[KeptToken] = []
        self.text_before = ""
        self._ids: list[int] = []
        self._made: tuple[int, str] = (0, "")  # so many tokens, with this text
        self._logprobs: list[Any] | None = None
        self._top: list[Any] | None = None

    def take(self, output: dict[str, Any]) -> None:
        meta = output["meta_info"]
        # SGLang goes on writing into these lists: what is complete now is counted by the ids.
        self._logprobs = meta.get("output_token_logprobs")
        self._top = meta.get("output_top_logprobs")
        self._ids = output["output_ids"]
        self._made = meta["completion_tokens"], output["text"]

    def part(self, offset: int) -> Part:
        count, _ = self._made
        first = min(count, max(0, offset - len(self.before)))
        ids = self._ids[first:count]
        made = [self._token(first + index, id) for index, id in enumerate(ids)]
        tokens = [*self.before[offset:], *made]
        return Part(offset, len(tokens), pack_tokens(tokens) if tokens else b"")

    def telling(
        self, stops: Sequence[str], cut: Callable[[list[int]], bool]
    ) -> Callable[[int], str]:
        """What readers may be told (base.py). `cut`: whether tokens end inside a character."""
        settled = ""  # what was made since, up to where the answer could go on

        def since(characters: int) -> str:
            nonlocal settled
            count, text = self._made
            tail = self._ids[max(0, count - _TAIL) : count]
            if len(text) > len(settled) and ends_whole(text, stops) and not cut(tail):
                settled = text
            before = len(self.text_before)
            if characters < before:
                return self.text_before[characters:] + settled
            return settled[characters - before :]

        return since

    def _token(self, index: int, id: int) -> KeptToken:
        if self._logprobs is None:
            return KeptToken(id)
        top = (self._top[index] if self._top else None) or ()
        return KeptToken(id, self._logprobs[index][0], tuple((entry[0], entry[1]) for entry in top))


class GoingOn:
    """Goes on from kept tokens so that the answer is as one made at once. `manager`: SGLang's tokenizer manager;
    `think_end`: the tokens that end the reasoning, where SGLang counts what comes before."""

    def __init__(self, manager: Any, think_end: list[int]) -> None:
        self._manager, self._think_end = manager, think_end
        self._cut: dict[int, bool] = {}

    def taken_over(
        self, turn: Turn, request: Any, kept: Sequence[Part], most: int
    ) -> list[KeptToken]:
        """The kept tokens from which the answer goes on."""
        tokens = joined(kept, unpack_tokens)[: max(0, most)]
        ids = [token.id for token in tokens]
        count = settled(
            len(ids), lambda n: self._decode(request, ids[:n]), turn.sampling.stop or ()
        )
        return tokens[:count]

    def cut(self, request: Any, ids: list[int]) -> bool:
        """Whether tokens end inside a character. SGLang leaves such an end out of its text."""
        last = ids[-1]
        if last not in self._cut:
            text = self._decode(request, [last])
            self._cut[last] = not text or text.endswith("\N{REPLACEMENT CHARACTER}")
        # By itself such a token may still be the end of a character.
        return self._cut[last] and self._decode(request, ids).endswith("\N{REPLACEMENT CHARACTER}")

    def text_of(self, request: Any, prompt: list[int], tokens: list[KeptToken]) -> str:
        """The text of an answer's first tokens."""
        # A tokenizer that joins words decodes differently at the beginning of a text.
        context = prompt[-_DECODE_CONTEXT:]
        ids = [token.id for token in tokens]
        return self._decode(request, context + ids)[len(self._decode(request, context)) :]

    def _decode(self, request: Any, ids: list[int]) -> str:
        """As SGLang's detokenizer does."""
        sampling = request.sampling_params
        text: str = self._manager.tokenizer.decode(
            ids,
            skip_special_tokens=sampling.get("skip_special_tokens", True),
            spaces_between_special_tokens=sampling.get("spaces_between_special_tokens", True),
        )
        return text

    def whole(
        self, request: Any, prompt: list[int], grown: Grown, output: dict[str, Any]
    ) -> dict[str, Any]:
        """What SGLang would have given if it had made the whole answer at once."""
        before = grown.before
        count, ids = len(before), [token.id for token in before]
        meta = dict(output["meta_info"])
        meta["prompt_tokens"] = len(prompt)
        meta["completion_tokens"] += count
        meta["cached_tokens"] = min(meta.get("cached_tokens") or 0, len(prompt))
        if "length" in meta["finish_reason"]:
            length = meta["finish_reason"]["length"] + count
            meta["finish_reason"] = {**meta["finish_reason"], "length": length}
        if "output_token_logprobs" in meta:
            made = self._manager.detokenize_logprob_tokens(
                [token.logprob for token in before], ids, True
            )
            meta["output_token_logprobs"] = [*made, *meta["output_token_logprobs"]]
        if "output_top_logprobs" in meta:
            made = self._manager.detokenize_top_logprobs_tokens(
                [[logprob for logprob, _ in token.top] for token in before],
                [[id for _, id in token.top] for token in before],
                True,
            )
            meta["output_top_logprobs"] = [*made, *meta["output_top_logprobs"]]
        whole = ids + list(output["output_ids"])
        if request.require_reasoning and self._think_end:
            meta["reasoning_tokens"] = _until(self._think_end, whole)
        text = grown.text_before + output["text"]
        return {**output, "output_ids": whole, "text": text, "meta_info": meta}


def remembers_nothing(request: Any) -> bool:
    """Whether SGLang remembers nothing of an answer but its tokens. The model's own defaults are among the
    sampling parameters."""
    sampling = request.sampling_params
    return (
        request.input_ids is not None
        and not any(sampling.get(field) for field in _REMEMBERS)
        and not sampling.get("frequency_penalty")
        and not sampling.get("presence_penalty")
        and sampling.get("repetition_penalty") in (None, 1)
        and sampling.get("sampling_seed") is None
        and not request.custom_logit_processor
    )


def _until(end: list[int], ids: list[int]) -> int:
    """How many tokens there are up to the end of `end` in `ids`, all if it is not there."""
    for index in range(len(end), len(ids) + 1):
        if ids[index - len(end) : index] == end:
            return index
    return len(ids)
