"""All that the model is told, but for what commands print."""

from __future__ import annotations

from typing import Any, Final

from turnmill.scaffolds.vanillux.sandbox import Ran
from turnmill.turn import Message, Tool

DONE: Final = "VANILLUX-DONE"
"""What a command prints last when the work is done."""

BASH: Final = Tool(
    function={
        "name": "bash",
        "description": "Run a command in bash on the task's machine. Returns what it printed, and its exit code.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "One line or a script."}},
            "required": ["command"],
            "additionalProperties": False,
        },
    }
)

_SYSTEM: Final = """\
You are an engineer at the command line of a Linux machine, and you solve the task that you are given there on your own. \
The tool `bash` is your only way to act: whatever you want to look at, write or try, you do with a command. Nobody reads your text \
or answers questions while you work."""

_TASK: Final = """\
{prompt}

How to work here:
- Every answer calls the tool `bash`. You see what the command printed, then you go on.
- You begin in the folder of the task. `cd` and `export` hold for the commands that follow; other variables, functions and options do not.
- Nothing can be typed into a running command, so use options such as `-y` instead of prompts, and no editors: write files with `cat` or scripts.
- A command is killed after {seconds:g} seconds. What takes longer, or serves, goes into the background with its output in a file: `server > server.log 2>&1 &`.
- Of long output you see the beginning and the end, {most} characters together.
- You have {steps} answers. Look before you change things, and test what you have made.
- When the task is done and tested, run `echo {done}`. This ends your work, and nothing can be changed afterwards."""

_NO_CALL: Final = "Error: your answer has no call of the tool `bash`, so nothing was run. Answer with one; if the task is done, run `echo {done}`."
_CUT: Final = " Your answer was cut off because it was too long."

NO_JSON: Final = 'Error: the arguments are not a JSON object, so nothing was run. They must be {"command": "..."}.'
NO_COMMAND: Final = 'Error: the arguments have no text "command", so nothing was run.'
NO_TEXT: Final = (
    "Error: the command has characters that no command can have (NUL, or half a character)."
)


def unknown_tool(name: Any) -> str:
    return f"Error: there is no tool {name!r}, so nothing was run. The only one is `bash`."


def opening(prompt: str, *, seconds: float, most: int, steps: int) -> list[Message]:
    """The messages that a conversation begins with."""
    task = _TASK.format(prompt=prompt.strip(), seconds=seconds, most=most, steps=steps, done=DONE)
    return [Message(role="system", content=_SYSTEM), Message(role="user", content=task)]


def no_call(cut: bool) -> Message:
    """What an answer that calls nothing is answered. `cut`: it met its own limit of tokens."""
    return Message(role="user", content=_NO_CALL.format(done=DONE) + _CUT * cut)


def result(id: str, text: str) -> Message:
    """The answer to a call."""
    return Message(role="tool", tool_call_id=id, content=text)


def observed(ran: Ran, seconds: float) -> str:
    """What a model is told of a command."""
    if ran["killed"] == "time":
        end = f"killed after {seconds:g} seconds, with all that it had started"
    elif ran["killed"] == "output":
        end = "killed, because it printed too much"
    else:
        end = f"exit code {ran['exit']}"
    output = ran["output"]
    if output and not output.endswith("\n"):
        output += "\n"
    return f"{output}[{end}]" if output else f"[{end}, no output]"


def is_submission(ran: Ran) -> bool:
    """Whether this command says that the work is done: it went well, and printed the marker as its last line."""
    lines = ran["output"].split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return ran["exit"] == 0 and not ran["killed"] and last == DONE
