"""`turnmill exec`: a harness that is killed, and run again, goes on."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from tests.gateway.serving import GatewayProcess
from tests.processes import SimWorker, until

from turnmill.settings import Farm

WorkerFactory = Callable[..., SimWorker]
HARNESS = (sys.executable, str(Path(__file__).with_name("harness.py")))
CHAIN = ("--answer", "chain", "--answer-tokens", "6")
QUESTIONS, REPEATS = 12, 3


def counted(farm: Farm, field: str) -> int:
    with redis.Redis.from_url(farm.url) as connection:
        return int(connection.hget(farm.keys.run("run"), field) or 0)


def reported(said: str) -> dict[str, Any]:
    report = json.loads(said.splitlines()[-1])
    assert isinstance(report, dict)
    return report


def test_a_harness_is_answered_and_answered_again(
    on_farm: Any, worker: WorkerFactory, tmp_path: Path
) -> None:
    worker(sim=CHAIN)
    asked = (*HARNESS, "out.json", str(QUESTIONS), str(REPEATS))
    done = on_farm("exec", "run", "--json", "--", *asked)
    first = json.loads((tmp_path / "out.json").read_text())
    assert len({answer for answers in first for answer in answers}) == QUESTIONS * REPEATS
    report = reported(done.stderr)
    assert (report["stored"], report["made"]) == (0, QUESTIONS * REPEATS)
    done = on_farm("exec", "run", "--", *asked)
    assert json.loads((tmp_path / "out.json").read_text()) == first
    assert f"{QUESTIONS * REPEATS} turns from the store, 0 made, 0 capped" in done.stderr


def test_all_are_killed_and_it_goes_on(
    on_farm: Any, worker: WorkerFactory, farm: Farm, tmp_path: Path
) -> None:
    """The gateway (which is exec's own process), then the worker, in the middle."""
    sim = (*CHAIN, "--latency", "0.2")
    one = worker(lease=0.5, sim=sim)
    line = ("exec", "run", "--json", "--", *HARNESS, "out.json", str(QUESTIONS), str(REPEATS))
    killed = on_farm.start(*line)
    until(lambda: counted(farm, "done") >= 3, "some are answered")
    killed.kill()
    killed.communicate()
    done_before = counted(farm, "done")
    one.kill()
    second = on_farm.start(*line)
    worker(lease=0.5, sim=sim)
    _, said = second.communicate(timeout=60)
    assert second.returncode == 0, said
    answers = json.loads((tmp_path / "out.json").read_text())
    assert len({answer for repeats in answers for answer in repeats}) == QUESTIONS * REPEATS
    report = reported(said)
    assert report["stored"] >= done_before
    assert report["stored"] + report["made"] == QUESTIONS * REPEATS
    assert counted(farm, "total") == QUESTIONS * REPEATS, "nothing is asked twice"
    again = on_farm(*line)
    assert reported(again.stderr)["made"] == 0
    assert json.loads((tmp_path / "out.json").read_text()) == answers


def test_alone_it_says_how_a_worker_joins(make_cli: Any) -> None:
    process = make_cli().start("exec", "run", "--", *HARNESS, "sleep")
    assert process.stderr is not None
    found = re.search(r"REDIS_URL=(unix://\S+)$", process.stderr.readline())
    assert found
    with redis.Redis.from_url(found[1]) as connection:
        assert connection.ping()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)


def test_the_exit_code_is_the_commands(on_farm: Any) -> None:
    done = on_farm("exec", "run", "--", *HARNESS, "exit", "7", exits=7)
    assert "0 turns from the store, 0 made" in done.stderr
    assert "nowhere" in on_farm("exec", "run", "--", "./nowhere", exits=127).stderr
    on_farm("exec", "a b", "--", "true", exits=2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_are_for_the_command(on_farm: Any, number: signal.Signals) -> None:
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip("ignored here, by nohup: and so by all that we start")
    process = on_farm.start("exec", "run", "--", *HARNESS, "sleep")
    assert process.stdout is not None
    assert process.stdout.readline() == "sleeping\n"
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    # Python ends by SIGINT of its own accord.
    assert process.returncode == 128 + number
    assert re.search("run run, attempt [0-9a-f]+: 0 turns", said)


def test_the_command_ends_with_us(on_farm: Any, tmp_path: Path) -> None:
    script = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    process = on_farm.start("exec", "run", "--", sys.executable, "-c", script)
    assert process.stdout is not None
    command = int(process.stdout.readline())
    process.kill()
    until(lambda: _is_gone(command), "the command has ended")


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_another_gateway_and_its_key(
    on_farm: Any, worker: WorkerFactory, serve: Callable[..., GatewayProcess], tmp_path: Path
) -> None:
    worker()
    url = serve().url
    key = on_farm("keys", "add", "alice").stdout.strip()
    asked = (*HARNESS, "out.json", "1", "1")
    line = ("exec", "run", "--json", "--url", f"{url}/v1")
    done = on_farm(*line, "--", *asked, OPENAI_API_KEY=key)
    assert json.loads((tmp_path / "out.json").read_text()) == [["question 0"]]
    assert reported(done.stderr)["made"] == 1
    refused = on_farm.start(*line, "--", *asked, OPENAI_API_KEY="sk-wrong")
    _, said = refused.communicate(timeout=60)
    assert refused.returncode == 1
    assert "the attempt cannot be reported" in said.splitlines()[-1]


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n[]", "no gateway"),
        (b"HTTP/1.1 200 OK\r\n\r\n{}", "no gateway"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", "more expected"),
        (b"SSH-2.0-OpenSSH\r\n", "SSH"),
    ],
)
def test_the_code_of_the_command_counts_whatever_is_behind_the_url(
    on_farm: Any, sent: bytes, told: str
) -> None:
    def answer() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(sent)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answer, daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        done = on_farm("exec", "--url", url, "run", "--", *HARNESS, "exit", "7", exits=7)
    (line,) = done.stderr.splitlines()
    assert told in line


def test_an_address_that_is_none(on_farm: Any) -> None:
    for url in ("http://127.0.0.1:port", "http://a b"):
        done = on_farm("exec", "--url", url, "run", "--", *HARNESS, "exit", "7", exits=7)
        (line,) = done.stderr.splitlines()
        assert "the attempt cannot be reported" in line


def test_what_is_refused_before_the_command_runs(on_farm: Any) -> None:
    for line in (("adhoc",), ("adhoc.alice",), ("--redis-url", "http://x", "run")):
        done = on_farm("exec", *line, "--", *HARNESS, "exit", "7", exits=2)
        assert len(done.stderr.splitlines()) == 1


def test_a_report_that_nobody_can_read_changes_no_code(farm: Farm) -> None:
    line = ("-m", "turnmill", "exec", "--redis-url", farm.url, "run", "--", *HARNESS, "exit", "7")
    with open("/dev/full", "w") as full:
        assert subprocess.run([sys.executable, *line], stderr=full, check=False).returncode == 7
