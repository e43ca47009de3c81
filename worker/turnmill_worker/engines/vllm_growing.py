"""Growing answers of vLLM: what is kept of them, and how one goes on from that. It follows vLLM's own way of writing text and
log probabilities; it imports that only where they are needed."""

from __future__ import annotations

from collections import deque
from typing import Any

from turnmill_worker.engines.growing import Growing
from turnmill_worker.engines.tokens import KeptToken

_REMEMBERS = (
    "min_tokens",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "bad_words",
    "structured_outputs",
    "thinking_token_budget",
    "repetition_detection",
    "watermarking",
)


class Grown(Growing):
    """Takes what vLLM says of an answer while it grows: what is new, each time. `stops`: its stop strings; `top`: how many
    of the likeliest tokens were asked for."""

    def __init__(self, stops: list[str], top: int) -> None:
        super().__init__()
        self._top = top
        self._logprobs: list[dict[int, Any]] = []
        self._text = ""
        # So many characters vLLM holds back, as they may be the beginning of a stop string.
        self._held = max((len(stop) for stop in stops), default=1) - 1
        self._ahead: deque[tuple[int, int]] = deque()

    @property
    def count(self) -> int:
        """Tokens, those that were taken over among them."""
        return len(self.before) + len(self._ids)

    def take(self, output: Any) -> None:
        self._ids.extend(output.token_ids)
        self._logprobs.extend(output.logprobs or ())
        self._text += output.text
        if not self._text:
            return
        # So long is the text of so many tokens; what it is, is known once all of it has come.
        self._ahead.append((len(self._ids), len(self._text) + self._held))
        while self._ahead and self._ahead[0][1] <= len(self._text):
            count, length = self._ahead.popleft()
            self._made = count, self._text[:length]

    def whole(self, output: Any, prompt: list[int], tokenizer: Any) -> Any:
        """vLLM's last output, as it would have been if the whole answer had been made at once."""
        answer = output.outputs[0]
        answer.text = self.text_before + self._text
        answer.token_ids = [token.id for token in self.before] + self._ids
        if answer.logprobs is not None:
            answer.logprobs = _logprobs(tokenizer, self.before, self._top) + self._logprobs
        output.prompt_token_ids = prompt
        output.num_cached_tokens = min(output.num_cached_tokens or 0, len(prompt))
        return output

    def _token(self, index: int, id: int) -> KeptToken:
        if not self._logprobs:
            return KeptToken(id)
        # The token itself comes first, and once: it may be among the likeliest.
        entries = list(self._logprobs[index].items())
        likeliest = entries if len(entries) == self._top else entries[1:]
        top = tuple((entry.logprob, token) for token, entry in likeliest)
        return KeptToken(id, self._logprobs[index][id].logprob, top)


def remembers_nothing(prompt: Any, params: Any) -> bool:
    """Whether vLLM remembers nothing of an answer but its tokens. The model's own defaults are among the parameters."""
    return (
        prompt.get("type") == "token"
        and not any(getattr(params, name, None) for name in _REMEMBERS)
        and params.repetition_penalty == 1
    )


def _logprobs(tokenizer: Any, tokens: list[KeptToken], top: int) -> list[dict[int, Any]]:
    """Kept log probabilities in vLLM's shape, made by vLLM of the numbers that its sampler gave."""
    if not tokens:
        return []
    import numpy
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.outputs import LogprobsLists

    made: list[dict[int, Any]] = []
    processor = LogprobsProcessor(
        tokenizer=tokenizer,
        logprobs=made,
        prompt_logprobs=None,
        cumulative_logprob=0.0,
        num_logprobs=top,
        num_prompt_logprobs=None,
    )
    ids = [[token.id, *(id for _, id in token.top)] for token in tokens]
    values = [[token.logprob, *(value for value, _ in token.top)] for token in tokens]
    processor._update_sample_logprobs(
        LogprobsLists(numpy.array(ids), numpy.array(values), numpy.ones(len(tokens), int))
    )
    return made
