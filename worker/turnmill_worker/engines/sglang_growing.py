"""Growing answers of SGLang: what is kept of them, and how one goes on from that. Like sglang.py, it follows one minor
version of SGLang; it imports nothing of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from turnmill.turn import Turn
from turnmill_worker.engines.growing import Cut, Growing, taken_over, text_of
from turnmill_worker.engines.kept import Part
from turnmill_worker.engines.tokens import KeptToken

_REMEMBERS = (
    "min_new_tokens",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "stop_regex",
    "custom_params",
)


class Grown(Growing):
    """Takes what SGLang says of an answer while it grows: all of it so far, each time."""

    def __init__(self) -> None:
        super().__init__()
        self._logprobs: list[Any] | None = None
        self._top: list[Any] | None = None

    def take(self, output: dict[str, Any]) -> None:
        meta = output["meta_info"]
        # SGLang goes on writing into these lists: what is complete now is counted by the ids.
        self._logprobs = meta.get("output_token_logprobs")
        self._top = meta.get("output_top_logprobs")
        self._ids = output["output_ids"]
        self._made = meta["completion_tokens"], output["text"]

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
        self._cut = Cut()

    def taken_over(
        self, turn: Turn, request: Any, kept: Sequence[Part], most: int
    ) -> list[KeptToken]:
        """The kept tokens from which the answer goes on."""
        return taken_over(kept, most, partial(self._decode, request), turn.sampling.stop or ())

    def cut(self, request: Any, ids: list[int]) -> bool:
        """Whether tokens end inside a character. SGLang leaves such an end out of its text."""
        return self._cut(partial(self._decode, request), ids)

    def text_of(self, request: Any, prompt: list[int], tokens: list[KeptToken]) -> str:
        """The text of an answer's first tokens."""
        return text_of(partial(self._decode, request), prompt, tokens)

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
