"""Where Redis is and how keys begin, from arguments and the environment."""

from __future__ import annotations

import pytest

from turnmill.client import Client
from turnmill.errors import UsageError
from turnmill.settings import Farm, check_name


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REDIS_URL", raising=False)
    monkeypatch.delenv("TURNMILL_NAMESPACE", raising=False)


def test_the_environment_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://farm:6379")
    assert Farm.from_environment() == Farm("redis://farm:6379", "turnmill")
    monkeypatch.setenv("TURNMILL_NAMESPACE", "team-a")
    assert Farm.from_environment() == Farm("redis://farm:6379", "team-a")


def test_arguments_go_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://farm:6379")
    monkeypatch.setenv("TURNMILL_NAMESPACE", "team-a")
    found = Farm.from_environment("unix:///run/redis.sock", "team-b")
    assert found == Farm("unix:///run/redis.sock", "team-b")


def test_without_a_redis_one_line_says_what_to_set() -> None:
    with pytest.raises(UsageError, match="set REDIS_URL"):
        Farm.from_environment()


@pytest.mark.parametrize(
    "url",
    [
        "localhost:6379",
        "http://localhost",
        "redis://farm:port",
        "redis://[farm",
        "redis://farm?decode_responses=True",
        "redis://farm?protocol=3",
    ],
)
def test_a_url_that_is_none_is_refused_by_name(url: str) -> None:
    with pytest.raises(UsageError, match="REDIS_URL"):
        Farm(url).connect()
    with pytest.raises(UsageError, match="REDIS_URL"):
        Client(url)


@pytest.mark.parametrize("url", ["rediss://user:pw@farm:6380/2", "unix:///run/s?db=3", "redis://h"])
def test_urls_are_redis_pys(url: str) -> None:
    assert Farm(url).pool(connections=1)


@pytest.mark.parametrize("name", ["a", "MMLU-pro_v1.2", "0", "x" * 100])
def test_names_that_fit(name: str) -> None:
    assert check_name(name, "run") == name


@pytest.mark.parametrize(
    "name", ["", ".", "-a", "a b", "a:b", "a/b", "a\n", "ü", "x" * 101, "../a"]
)
def test_names_that_do_not_fit_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="run "):
        check_name(name, "run")
    with pytest.raises(UsageError, match="namespace "):
        Farm.from_environment("redis://h", name or " ")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"priority": 10}, "priority 10"),
        ({"priority": -1}, "priority -1"),
        ({"weight": 0}, "weight 0"),
        ({"weight": float("nan")}, "weight nan"),
        ({"run": "a b"}, "run 'a b'"),
    ],
)
def test_a_client_refuses_what_cannot_be(options: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Client("redis://h", **options)  # type: ignore[arg-type]
