"""A harness that knows nothing of turnmill: asks what it is told to at the base URL of its environment, with the
standard library alone, and writes the answers as JSON. `harness.py FILE QUESTIONS REPEATS [PAUSE]`."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def ask(question: str) -> str:
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "sim", "messages": [{"role": "user", "content": question}]}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: str = json.load(response)["choices"][0]["message"]["content"]
    return answer


def ask_all(question: str, repeats: int) -> list[str]:
    """One after the other: so the k-th is the same draw in each attempt."""
    return [ask(question) for _ in range(repeats)]


def main(file: str, questions: str, repeats: str) -> None:
    names = [f"question {i}" for i in range(int(questions))]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda name: ask_all(name, int(repeats)), names))
    Path(file).write_text(json.dumps(answers))


if __name__ == "__main__":
    if sys.argv[1] == "sleep":
        print("sleeping", flush=True)
        time.sleep(60)
    elif sys.argv[1] == "exit":
        sys.exit(int(sys.argv[2]))
    else:
        main(*sys.argv[1:])
