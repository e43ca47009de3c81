"""Every Redis key name. docs/protocol.md says what is in them.

All keys begin with the namespace, so that teams can share a Redis. The scripts compute the names of a
model's queue and of a turn's records from two prefixes, `Keys.prefix` and `Keys.queue(model)`, by the same
rules as here.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_NAMESPACE = "turnmill"


@dataclass(frozen=True)
class Keys:
    """The key names of one namespace."""

    namespace: str = DEFAULT_NAMESPACE

    @property
    def prefix(self) -> str:
        return f"{self.namespace}:"

    # One turn, by request hash.

    def body(self, hash: str) -> str:
        return f"{self.prefix}b:{hash}"

    def reply(self, hash: str) -> str:
        return f"{self.prefix}r:{hash}"

    def trace(self, hash: str) -> str:
        return f"{self.prefix}x:{hash}"

    def failure(self, hash: str) -> str:
        return f"{self.prefix}f:{hash}"

    def earlier(self, hash: str) -> str:
        return f"{self.prefix}y:{hash}"

    def tries(self, hash: str) -> str:
        return f"{self.prefix}t:{hash}"

    def waiters(self, hash: str) -> str:
        return f"{self.prefix}w:{hash}"

    def partial(self, hash: str) -> str:
        return f"{self.prefix}p:{hash}"

    def told_of(self, hash: str) -> str:
        return f"{self.prefix}s:{hash}"

    def jobs_of(self, hash: str) -> str:
        return f"{self.prefix}a:{hash}"

    def leavers(self, hash: str) -> str:
        return f"{self.prefix}c:{hash}"

    # The queue of one model: this and a name below.

    def queue(self, model: str) -> str:
        return f"{self.prefix}q:{model}:"

    def finished(self, model: str) -> str:
        return f"{self.queue(model)}finished"

    def told(self, model: str) -> str:
        return f"{self.queue(model)}told"

    def wake(self, model: str) -> str:
        return f"{self.queue(model)}wake"

    def leases(self, model: str) -> str:
        return f"{self.queue(model)}leases"

    def owners(self, model: str) -> str:
        return f"{self.queue(model)}owners"

    def due(self, model: str) -> str:
        return f"{self.queue(model)}due"

    def jobs(self, model: str) -> str:
        return f"{self.queue(model)}jobs"

    def suspects(self, model: str) -> str:
        return f"{self.queue(model)}suspects"

    def classes(self, model: str) -> str:
        return f"{self.queue(model)}fed"

    def ready(self, model: str, priority: str) -> str:
        return f"{self.queue(model)}ready:{priority}"

    def going(self, model: str, priority: str, run: str) -> str:
        return f"{self.queue(model)}going:{priority}:{run}"

    def new(self, model: str, priority: str, run: str) -> str:
        return f"{self.queue(model)}new:{priority}:{run}"

    def turns(self, model: str, run: str) -> str:
        return f"{self.queue(model)}turns:{run}"

    def swept(self, model: str, run: str) -> str:
        return f"{self.queue(model)}sweep:{run}"

    def held(self, model: str) -> str:
        return f"{self.queue(model)}held"

    def spent(self, model: str) -> str:
        return f"{self.queue(model)}spent"

    def tended(self, model: str) -> str:
        return f"{self.queue(model)}tended"

    def seen(self, model: str) -> str:
        return f"{self.queue(model)}seen"

    # Gateways.

    @property
    def api_keys(self) -> str:
        return f"{self.prefix}api_keys"

    @property
    def api_key_names(self) -> str:
        return f"{self.prefix}api_key_names"

    def runs_of(self, key_name: str) -> str:
        return f"{self.prefix}key_runs:{key_name}"

    def attempts(self, run: str) -> str:
        return f"{self.prefix}attempts:{run}"

    def attempt(self, run: str, attempt: str) -> str:
        return f"{self.prefix}attempt:{run}:{attempt}"

    def draws(self, scope: str) -> str:
        return f"{self.prefix}draws:{scope}"

    def open_draws(self, scope: str, base: str) -> str:
        return f"{self.prefix}open:{scope}:{base}"

    def repeatable(self, scope: str, digest: str) -> str:
        return f"{self.prefix}idem:{scope}:{digest}"

    # The farm.

    @property
    def lease(self) -> str:
        return f"{self.prefix}lease"

    @property
    def scripts(self) -> str:
        return f"{self.prefix}scripts"

    @property
    def models(self) -> str:
        return f"{self.prefix}models"

    @property
    def workers(self) -> str:
        return f"{self.prefix}workers"

    def worker(self, worker: str) -> str:
        return f"{self.prefix}worker:{worker}"

    def crashes(self, station: str) -> str:
        return f"{self.prefix}crashes:{station}"

    @property
    def benched(self) -> str:
        return f"{self.prefix}benched"

    @property
    def runs(self) -> str:
        return f"{self.prefix}runs"

    def run(self, run: str) -> str:
        return f"{self.prefix}run:{run}"

    @property
    def expiring(self) -> str:
        return f"{self.prefix}expiring"

    def manifest(self, run: str) -> str:
        return f"{self.prefix}manifest:{run}"

    def journal(self, run: str) -> str:
        return f"{self.prefix}journal:{run}"

    def engines(self, run: str) -> str:
        return f"{self.prefix}engines:{run}"

    def producer(self, run: str) -> str:
        return f"{self.prefix}producer:{run}"
