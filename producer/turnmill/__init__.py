"""A durable queue of conversation turns in front of one inference engine.

from turnmill import Client, Turn

async with Client("redis://127.0.0.1:6379") as client:
    turn = Turn(model="Qwen3-8B", messages=[{"role": "user", "content": "Hello"}])
    ending = await client.ask(turn)
"""

from turnmill.client import BlockingClient, Client, FarmStatus
from turnmill.errors import (
    BadInput,
    BadLines,
    BadTurn,
    CannotWrite,
    ClientClosed,
    ManifestChanged,
    NewerRecord,
    QueueFull,
    RecordError,
    RedisAway,
    RedisUnusable,
    RunInUse,
    StreamBroken,
    TurnFailed,
    TurnmillError,
    UsageError,
)
from turnmill.reading import Delta
from turnmill.reply import EngineIdentity, Failure, Reply, Trace, Usage
from turnmill.turn import Message, Sampling, Tool, Turn

__all__ = [
    "BadInput",
    "BadLines",
    "BadTurn",
    "BlockingClient",
    "CannotWrite",
    "Client",
    "ClientClosed",
    "Delta",
    "EngineIdentity",
    "Failure",
    "FarmStatus",
    "ManifestChanged",
    "Message",
    "NewerRecord",
    "QueueFull",
    "RecordError",
    "RedisAway",
    "RedisUnusable",
    "Reply",
    "RunInUse",
    "Sampling",
    "StreamBroken",
    "Tool",
    "Trace",
    "Turn",
    "TurnFailed",
    "TurnmillError",
    "Usage",
    "UsageError",
]
