"""vLLM's start: its command line's arguments, its engine, and the chat layer of its HTTP server on top of that."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from types import SimpleNamespace
from typing import Any, NamedTuple

from turnmill.errors import UsageError
from turnmill_worker.engines.arguments import check_path, first_line, last_line
from turnmill_worker.engines.base import EngineDied, EngineSettings
from turnmill_worker.engines.vllm_child import WORKER
from turnmill_worker.engines.vllm_parsers import choose_parsers

_REFUSED = {
    "headless": "a worker holds the engine's first node; start the others with `vllm serve --headless`",
    "grpc": "turns come from the queue",
    "skip_tokenizer_init": "messages need a tokenizer",
}


class Launched(NamedTuple):
    """`client`: vLLM's AsyncLLM. `chat`, `completions`: what its HTTP server answers requests with."""

    client: Any
    chat: Any
    completions: Any


def arguments(settings: EngineSettings) -> Any:
    """The arguments of `vllm serve`, parsed by its own parser. Raises UsageError with its own words, in one line."""
    try:
        from vllm.entrypoints.launchers.cli_args import (
            make_arg_parser,
            validate_parsed_serve_args,
        )
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError as error:
        raise UsageError(
            f"vLLM cannot be imported (pip install 'turnmill[vllm]'): {error}"
        ) from None
    check_path("engine vllm: --model", settings.model)
    argv = list(settings.arguments)
    if settings.revision is not None:
        argv = ["--revision", settings.revision, *argv]
    if settings.model is not None:
        argv = ["--model", settings.model, *argv]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parsed = make_arg_parser(FlexibleArgumentParser(prog="vllm serve")).parse_args(argv)
        validate_parsed_serve_args(parsed)
    except SystemExit as exit:
        if not exit.code:  # --help
            raise
        words = last_line(said.getvalue()).removeprefix("vllm serve: error: ")
        raise UsageError(f"engine vllm: {words}") from None
    except Exception as error:
        raise UsageError(f"engine vllm: {first_line(error)}") from error
    if parsed.model_tag is not None:
        parsed.model = parsed.model_tag
    for name, why in _REFUSED.items():
        if getattr(parsed, name, False):
            raise UsageError(f"engine vllm: --{name.replace('_', '-')}: {why}")
    for adapter in parsed.lora_modules or ():
        check_path("engine vllm: --lora-modules", adapter.path)
    return parsed


async def launch(parsed: Any) -> Launched:
    """The engine, its processes running, bound to the running loop. Raises UsageError for a model or a setting that it does
    not take, EngineDied when its processes do not come up."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    os.environ[WORKER] = str(os.getpid())
    try:
        choose_parsers(parsed)
        engine_arguments = AsyncEngineArgs.from_cli_args(parsed)
        # What is not said is as in its server: some of its defaults depend on who asks.
        config = engine_arguments.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
        _import_parsers(parsed)
        _leave_room_for_none(parsed)
    except Exception as error:
        raise UsageError(f"engine vllm: {first_line(error)}") from error
    try:
        client = AsyncLLM.from_vllm_config(
            config,
            usage_context=UsageContext.OPENAI_API_SERVER,
            enable_log_requests=engine_arguments.enable_log_requests,
            disable_log_stats=engine_arguments.disable_log_stats,
        )
    except Exception as error:
        raise EngineDied(f"vLLM did not start: {first_line(error)}") from error
    state = SimpleNamespace()  # of its web application, which there is none of
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            await init_app_state(client, state, parsed, await client.get_supported_tasks())
        if state.openai_serving_chat is None:
            raise UsageError("engine vllm: this model does not generate text")
    except Exception as error:
        client.shutdown(timeout=0)
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"engine vllm: {first_line(error)}") from error
    return Launched(client, state.openai_serving_chat, state.openai_serving_completion)


def _leave_room_for_none(parsed: Any) -> None:
    """On a CPU vLLM looks up the weights of "no adapter" in its last place for one: where the plain model is in a batch with
    adapters, it would answer as the adapter there. (The index is -1, to vllm/lora/ops/torch_ops a place like others.)"""
    from vllm.platforms import current_platform

    count = len(parsed.lora_modules or ())
    if count and current_platform.is_cpu() and parsed.max_loras <= count:
        raise ValueError(
            f"--max-loras {parsed.max_loras}: on a CPU it must be more than the adapters, {count + 1} or more, "
            "or vLLM mixes one of them into the model's own answers"
        )


def _import_parsers(parsed: Any) -> None:
    """Parsers that are in files of the user's, and whether those that are asked for exist."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    if parsed.tool_parser_plugin:
        ToolParserManager.import_tool_parser(parsed.tool_parser_plugin)
    if plugin := getattr(parsed, "reasoning_parser_plugin", None):
        ReasoningParserManager.import_reasoning_parser(plugin)
    if parsed.enable_auto_tool_choice and not parsed.tool_call_parser:
        raise ValueError("--enable-auto-tool-choice requires --tool-call-parser")
