"""`auto` in the place of a parser's name, which vLLM does not have: chosen by the chat template."""

from __future__ import annotations

from typing import Any

from turnmill_worker.engines.template_marks import (
    AUTO,
    HERMES,
    LLAMA3,
    MISTRAL,
    NOT_HERMES,
    Rule,
    first_match,
    say,
    text_of,
)

_HARMONY = ("<|channel|>", "<|start|>")

RULES = {
    "tool_call_parser": (
        Rule("openai", _HARMONY),
        Rule("gemma4", ("<|channel>", "<|tool_call>")),
        Rule("kimi_k2", ("<|tool_calls_section_begin|>",)),
        Rule("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
        Rule("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
        Rule("deepseek_v32", ("<｜DSML｜function_calls>",)),
        Rule("deepseek_v4", ("<｜DSML｜tool_calls>",)),
        Rule("minimax_m2", ("<minimax:tool_call>",)),
        Rule("seed_oss", ("<seed:tool_call>",)),
        Rule("glm45", ("[gMASK]<sop>", "<arg_key>")),
        Rule("lfm2", ("<|tool_call_start|>",)),
        Rule("granite", ("<|start_of_role|>", "<|tool_call|>")),
        Rule("granite4", ("<|start_of_role|>", *HERMES), NOT_HERMES),
        Rule("qwen3_coder", ("<function=", "<parameter=")),
        Rule("mistral", MISTRAL),
        Rule("llama3_json", LLAMA3),
        Rule("hermes", HERMES, NOT_HERMES),
    ),
    "reasoning_parser": (
        Rule("openai_gptoss", _HARMONY),
        Rule("gemma4", ("<|channel>", "enable_thinking")),
        Rule("mistral", ("[THINK]",)),
        Rule("seed_oss", ("<seed:think>",)),
        Rule("glm45", ("[gMASK]<sop>", "<think>")),
        Rule("minimax_m2", ("<minimax:tool_call>", "<think>")),
        Rule("kimi_k2", ("<|im_middle|>", "<think>")),
        # Where thinking can be turned on, and where it is always on.
        Rule("deepseek_v3", ("<｜Assistant｜>", "<think>", "not thinking")),
        Rule("deepseek_r1", ("<｜Assistant｜>", "</think>")),
        Rule("nemotron_v3", ("truncate_history_thinking",), ("defer_loading",)),
        Rule("qwen3", ("<think>", "enable_thinking is defined and enable_thinking is false")),
        # The prompt itself begins to think. `\n` as Jinja has it in a string, and as it is in text.
        Rule("deepseek_r1", (r"assistant\n<think>",), ("enable_thinking",)),
        Rule("deepseek_r1", ("assistant\n<think>",), ("enable_thinking",)),
    ),
}


def choose_parsers(parsed: Any) -> None:
    """Put names where vLLM's parsed arguments say `auto`: none, where no rule fits. Raises what vLLM raises for a
    model or a template that it cannot read."""
    asked = [argument for argument in RULES if getattr(parsed, argument) == AUTO]
    if not asked:
        return
    for argument in asked:
        setattr(parsed, argument, "")
    template = _template(parsed)
    for argument in asked:
        found = first_match(template, RULES[argument])
        say("vllm", argument, found)
        setattr(parsed, argument, found or "")
    if "tool_call_parser" in asked:  # which vLLM uses only with that
        parsed.enable_auto_tool_choice = bool(parsed.tool_call_parser)


def _template(parsed: Any) -> str:
    """The chat template that vLLM will use for tools, or nothing where the tokenizer has another way."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.renderers.chat_utils import load_chat_template
    from vllm.tokenizers import cached_tokenizer_from_config

    given = load_chat_template(parsed.chat_template)
    if given is not None:
        return str(given)
    tokenizer = cached_tokenizer_from_config(
        AsyncEngineArgs.from_cli_args(parsed).create_model_config()
    )
    return text_of(tokenizer)
