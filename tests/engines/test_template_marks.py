"""Parsers chosen by the marks in chat templates."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from turnmill_worker.engines import sglang_parsers, vllm_parsers
from turnmill_worker.engines.sglang_parsers import complete_parsers
from turnmill_worker.engines.template_marks import first_match, text_of

JSON_CALL = '<tool_call>\n{"name": "f", "arguments": {{ call.arguments | tojson }}}\n</tool_call>'
THINKING_OFF = (
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>{% endif %}"
)
R1_CALL = "'<｜tool▁calls▁begin｜>' + call.type + '\\n```json\\n' + call.arguments"

TEMPLATES: dict[str, tuple[str, str | None, str | None]] = {
    "qwen 2.5": (f"<|im_start|>assistant\n{JSON_CALL}", "hermes", None),
    "qwen 3": (f"<|im_start|>assistant\n{JSON_CALL}{THINKING_OFF}", "hermes", "qwen3"),
    "qwen 3, always thinking": (
        f"{JSON_CALL}{{{{ '<|im_start|>assistant\\n<think>\\n' }}}}",
        "hermes",
        "deepseek_r1",
    ),
    "qwen 3 coder": ("<tool_call>\n<function=f>\n<parameter=p>arguments", "qwen3_coder", None),
    "qwen 3.5": (
        "<tool_call>\n<function=f>\n<parameter=p>" + THINKING_OFF,
        "qwen3_coder",
        "qwen3",
    ),
    "mistral": ("[AVAILABLE_TOOLS][/AVAILABLE_TOOLS][TOOL_CALLS]", "mistral", None),
    "magistral": ("[THINK][/THINK][TOOL_CALLS]", "mistral", "mistral"),
    "llama 3": (
        "<|start_header_id|>assistant<|end_header_id|>'Respond in the format "
        '{"name": function name, "parameters": dictionary of argument name and its value}.\'',
        "llama3_json",
        None,
    ),
    "deepseek r1": (
        "{{'<｜Assistant｜>' + content.split('</think>')[-1]}}" + R1_CALL,
        "deepseek_v3",
        "deepseek_r1",
    ),
    "deepseek v3.1": (
        "'<｜Assistant｜>'{% if not thinking %}</think>{% else %}<think>{% endif %}<｜tool▁calls▁begin｜>",
        "deepseek_v31",
        "deepseek_v3",
    ),
    "glm 4.5": ("[gMASK]<sop><tool_call>f\n<arg_key>a</arg_key><think>", "glm45", "glm45"),
    "kimi k2 thinking": (
        "<|im_middle|><think></think><|tool_calls_section_begin|>",
        "kimi_k2",
        "kimi_k2",
    ),
    "minimax m2": ("<minimax:tool_call><invoke name='f'><think>", "minimax_m2", "minimax_m2"),
    "seed oss": (
        "<seed:tool_call>\n<function=f>\n<parameter=p><seed:think>",
        "seed_oss",
        "seed_oss",
    ),
    "gpt-oss": ("<|start|>assistant<|channel|>analysis", "openai", "openai_gptoss"),
    "granite 3": ("<|start_of_role|>assistant<|end_of_role|><|tool_call|>", "granite", None),
    "granite 4": (f"<|start_of_role|>assistant<|end_of_role|>{JSON_CALL}", "granite4", None),
    "no tools, no thinking": ("<|im_start|>{{ message.content }}<|im_end|>", None, None),
    "calls of another kind": ("<tool_call>f<arg_key>k</arg_key> {# arguments #}", None, None),
    "thinking only in what was said": ("{{ content.split('</think>')[-1] }}", None, None),
    "thinking where it is asked for": (
        "{% set enable_thinking = enable_thinking | default(false) %}<think>",
        None,
        None,
    ),
}


@pytest.mark.parametrize(("template", "tools", "reasoning"), TEMPLATES.values(), ids=TEMPLATES)
def test_vllms_parsers(template: str, tools: str | None, reasoning: str | None) -> None:
    assert first_match(template, vllm_parsers.RULES["tool_call_parser"]) == tools
    assert first_match(template, vllm_parsers.RULES["reasoning_parser"]) == reasoning


@pytest.mark.parametrize(
    ("name", "parser"),
    [
        ("qwen 2.5", "qwen"),
        ("mistral", "mistral"),
        ("llama 3", "llama3"),
        ("calls of another kind", None),
    ],
)
def test_what_sglang_does_not_find(name: str, parser: str | None) -> None:
    assert first_match(TEMPLATES[name][0], sglang_parsers.RULES) == parser


def test_all_templates_of_a_tokenizer_are_looked_at() -> None:
    several = {"default": "plain", "tool_use": "[TOOL_CALLS]"}
    assert text_of(SimpleNamespace(chat_template=several)) == "plain\n[TOOL_CALLS]"
    assert text_of(SimpleNamespace(chat_template=None)) == text_of(object()) == ""


class Manager:
    """As much of SGLang's as parsers need."""

    def __init__(self, template: str, **found: str | None) -> None:
        self.tokenizer = SimpleNamespace(chat_template=template)
        self.found = found

    def config_value(self, name: str) -> str | None:
        return self.found[name]

    def record_config_updates(self, source: str, **fields: Any) -> None:
        self.found |= fields


@pytest.mark.parametrize(
    ("asked", "found", "then", "said"),
    [
        (("auto", None), (None, None), ("llama3", None), ["tool-call parser llama3"]),
        (("auto", "auto"), ("kimi_k2", None), ("kimi_k2", None), ["kimi_k2", "no reasoning"]),
        ((None, None), (None, None), (None, None), []),
        (("mistral", "qwen3"), ("mistral", "qwen3"), ("mistral", "qwen3"), []),
    ],
)
def test_what_sglang_has_found_stays(
    asked: tuple[str | None, str | None],
    found: tuple[str | None, str | None],
    then: tuple[str | None, str | None],
    said: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    names = ("tool_call_parser", "reasoning_parser")
    manager = Manager(TEMPLATES["llama 3"][0], **dict(zip(names, found, strict=True)))
    complete_parsers(SimpleNamespace(**dict(zip(names, asked, strict=True))), manager)
    assert tuple(manager.found.values()) == then
    assert len(caplog.messages) == len(said)
    assert all(words in message for words, message in zip(said, caplog.messages, strict=True))
