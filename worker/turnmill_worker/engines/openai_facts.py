"""What a server says of itself: its models, and, where it is one that is known, version, context and slots."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Any

from turnmill.errors import UsageError
from turnmill_worker.engines.openai_http import Connection, Cut, Said

_FEW = 8


@dataclass(frozen=True)
class Facts:
    """`kind`: whose server it is, as far as that is known. `health`: the URL that says whether it is well. `context`
    in tokens (0: not known); `slots`: how many requests it runs at once."""

    model: str
    health: str
    kind: str = ""
    version: str = "unknown"
    context: int = 0
    slots: int | None = None
    dtype: str | None = None

    @property
    def counts(self) -> bool:
        """Whether its streams can say with each chunk how many tokens there are."""
        return self.kind in ("sglang", "vllm")


async def ask_facts(connection: Connection, model: str | None) -> Facts:
    """Facts of a server that is there. Raises Cut while it is not, and UsageError if it can never serve `model` (None:
    the only one that it has)."""
    models = f"{connection.url}/models"
    said = await connection.get(models)
    if said.status >= 500 or said.status == 429:
        raise Cut(f"{models}: {said.status}: {said.words}", sent=True)
    if said.status in (401, 403):
        raise UsageError(
            f"engine openai: {models}: {said.status}: {said.words}; its key is read from OPENAI_API_KEY"
        )
    if said.status != 200:
        # Not every server has a list; then its answers will tell.
        if model is None:
            raise UsageError(
                f"engine openai: {models}: {said.status}: {said.words}; without a list of models, give --model"
            )
        return Facts(model, models)
    card = _card(_cards(models, said), model)
    facts = Facts(card["id"], models, context=_context(card))
    match card.get("owned_by"):
        case "sglang":
            return await _sglang(connection, facts)
        case "vllm":
            return await _vllm(connection, facts)
        case "llamacpp":
            return await _llama_cpp(connection, facts)
    return facts


def _cards(url: str, said: Said) -> list[dict[str, Any]]:
    cards = said.data.get("data") if isinstance(said.data, dict) else said.data
    if not isinstance(cards, list):
        raise UsageError(f"engine openai: {url} is not a list of models: is the base URL right?")
    return [card for card in cards if isinstance(card, dict) and isinstance(card.get("id"), str)]


def _card(cards: list[dict[str, Any]], model: str | None) -> dict[str, Any]:
    found = [card for card in cards if model in (None, card["id"])]
    if len(found) == 1:
        return found[0]
    names = [card["id"] for card in cards]
    if not names:
        raise UsageError("engine openai: the server has no models")
    if found:
        raise UsageError(f"engine openai: --model: the server has several: {_some(names)}")
    close = difflib.get_close_matches(model or "", names, _FEW) or names
    raise UsageError(f"engine openai: the server has no model {model}; it has {_some(close)}")


def _some(names: list[str]) -> str:
    more = len(names) - _FEW
    return ", ".join(names[:_FEW]) + (f" and {more} more" if more > 0 else "")


def _context(card: dict[str, Any]) -> int:
    """By the names that servers have for it: vLLM and SGLang, OpenRouter and Together, Groq, Mistral."""
    for name in ("max_model_len", "context_length", "context_window", "max_context_length"):
        if isinstance(card.get(name), int) and card[name] > 0:
            return int(card[name])
    return 0


async def _sglang(connection: Connection, facts: Facts) -> Facts:
    facts = replace(facts, kind="sglang", health=connection.root("/health"))
    info = (await connection.get(connection.root("/server_info"))).data
    if not isinstance(info, dict):
        return facts
    facts = replace(
        facts,
        version=f"sglang {info.get('version', 'unknown')}",
        dtype=info.get("dtype") if info.get("dtype") != "auto" else None,
    )
    states = info.get("internal_states") or [{}]
    slots = [state.get("effective_max_running_requests_per_dp") for state in states]
    if all(slots):
        facts = replace(facts, slots=sum(slots))
    try:
        # Its scheduler ends an answer, without a word, 2 tokens before the context; and keeps a page of the cache.
        in_cache = info["max_total_num_tokens"] - 2 * info["page_size"]
        context = min(facts.context, info["max_req_input_len"] + 4, in_cache)
    except (KeyError, TypeError):
        return facts
    return replace(facts, context=context)


async def _vllm(connection: Connection, facts: Facts) -> Facts:
    said = (await connection.get(connection.root("/version"))).data
    version = said.get("version", "unknown") if isinstance(said, dict) else "unknown"
    return replace(facts, kind="vllm", health=connection.root("/health"), version=f"vllm {version}")


async def _llama_cpp(connection: Connection, facts: Facts) -> Facts:
    facts = replace(facts, kind="llama.cpp", health=connection.root("/health"))
    props = (await connection.get(connection.root("/props"))).data
    if not isinstance(props, dict):
        return facts
    settings = props.get("default_generation_settings") or {}
    return replace(
        facts,
        version=f"llama.cpp {props.get('build_info', 'unknown')}",
        context=settings.get("n_ctx") or facts.context,
        slots=props.get("total_slots"),
    )
