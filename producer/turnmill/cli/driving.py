"""Driving runs, and looking ahead at them: what `turnmill run` does with one, and `turnmill suite` with several."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.live import Live

from turnmill import display
from turnmill.asking import AGAIN
from turnmill.cli.common import a_farm, err
from turnmill.client import Client
from turnmill.engines_met import EnginesMet
from turnmill.errors import UsageError
from turnmill.faults import patiently
from turnmill.local_farm import WorkerCommand, WorkerProcess
from turnmill.manifest import check_unchanged, manifest_of
from turnmill.output import RunFiles, check_folder
from turnmill.rehearsal import Outlook, Rehearsal
from turnmill.run import Run, RunEnd
from turnmill.run_settings import RunSettings
from turnmill.settings import Farm
from turnmill.spec import Plan
from turnmill.store import WorkerInfo
from turnmill.tasks import end_tasks

LINE_SECONDS = 10.0

attempt_options = [
    click.option(
        "--again",
        type=click.Choice(AGAIN),
        multiple=True,
        help="Ask again what is stored with this ending. May be given several times.",
    ),
    click.option(
        "--extend", is_flag=True, help="Take changed input or settings under the same name."
    ),
    click.option(
        "--allow-mixed", is_flag=True, help="Take another engine than the run's replies are from."
    ),
    click.option("--dry-run", is_flag=True, help="Say what would be asked, and ask nothing."),
]


class Place:
    """Where runs are driven: a farm; where it is an embedded one (`alone`), with a worker of its own, which stays for
    the next run if that wants the same."""

    def __init__(self, farm: Farm, alone: bool) -> None:
        self.farm, self.alone = farm, alone
        self._command: WorkerCommand | None = None
        self._worker: WorkerProcess | None = None

    def client(self, run: str) -> Client:
        return Client(self.farm.url, namespace=self.farm.namespace, run=run, patience=None)

    async def worker_for(self, plan: Plan) -> WorkerProcess | None:
        """The worker that answers this run; None: those of the farm do."""
        if self.alone and plan.spec.worker != self._command:
            await self.close()
            self._command = plan.spec.worker
            self._worker = WorkerProcess(self._command, self.farm, plan.folder / "worker.log")
            self._worker.start()
        return self._worker

    async def close(self) -> None:
        if self._worker:
            await asyncio.to_thread(self._worker.stop)
        self._worker = self._command = None


@contextlib.asynccontextmanager
async def a_place(
    redis_url: str | None, namespace: str | None, data: Path | None
) -> AsyncIterator[Place]:
    async with a_farm(redis_url, namespace, data) as farm:
        place = Place(farm, alone=not redis_url)
        try:
            yield place
        finally:
            await place.close()


def say_left_out(plan: Plan) -> None:
    for bad in plan.left_out:
        err.print(f"left out: {bad}", soft_wrap=True)


async def drive(plan: Plan, place: Place) -> RunEnd:
    """One attempt at a run, shown as it goes."""
    with RunFiles(plan.folder, plan.name) as files:
        async with place.client(plan.name) as client:
            worker = None
            model = await _stored_model(plan, client) if place.alone else None
            if model is None:
                worker = await place.worker_for(plan)
            async with _kept_alive(worker):
                if worker:
                    model = await worker.served_model(client.store)
                elif model is None:
                    model = plan.spec.asks_for or await _only_model(client)
                settings = replace(plan.settings, model=model)
                a_run = Run(settings, plan.items, plan.scaffold, client, files)
                return await _show_while(a_run, plan.name)


async def check(plan: Plan, place: Place) -> None:
    """Raises what the run would before it asks, as far as that can be seen without a worker."""
    async with place.client(plan.name) as client:
        await _as_begun(plan, place, client)


async def look_ahead(plan: Plan, place: Place) -> Outlook:
    """A dry run. Raises what the run itself would before it asks."""
    async with place.client(plan.name) as client:
        settings, workers = await _as_begun(plan, place, client)
        context = max((worker.context for worker in workers), default=0)
        outlook = await Rehearsal(settings, plan.items, plan.scaffold, client, context).look()
        if not (outlook.nothing_to_ask or settings.allow_mixed):
            engines = EnginesMet(client.store.redis, client.farm.keys, plan.name)
            await engines.read()
            if changed := engines.changed(worker.engine for worker in workers):
                raise changed
        return outlook


async def _as_begun(
    plan: Plan, place: Place, client: Client
) -> tuple[RunSettings, list[WorkerInfo]]:
    """The settings with the model that turns would ask for (empty: nobody knows yet), and the live workers that serve
    it. Raises UsageError where folder or manifest are another run's."""
    check_folder(plan.folder, plan.name)
    before = await _manifest(plan, client)
    workers = await patiently(
        client.store.workers, patience=None, doing="reading which workers live"
    )
    begun_with: str | None = before["model"] if before else None
    if not place.alone:
        model = plan.spec.asks_for or _one_model(workers) or begun_with
    elif begun_with is None:
        model = plan.spec.served_name
    else:
        model = begun_with if plan.spec.may_serve(begun_with) else plan.spec.asks_for
    settings = replace(plan.settings, model=model or "")
    if before and not settings.extend:
        check_unchanged(plan.name, before, manifest_of(settings, plan.scaffold, plan.items))
    return settings, [worker for worker in workers if worker.model == model]


async def _stored_model(plan: Plan, client: Client) -> str | None:
    """The model of a run of which all is stored, so that no worker has to load it; else None."""
    before = await _manifest(plan, client)
    if before is None or not plan.spec.may_serve(before["model"]):
        return None
    settings = replace(plan.settings, model=before["model"])
    if before != manifest_of(settings, plan.scaffold, plan.items):
        return None
    # Who knows how much more the worker could hold: what met a full context is not all there is.
    rehearsal = Rehearsal(settings, plan.items, plan.scaffold, client, context=sys.maxsize)
    outlook = await rehearsal.look()
    return settings.model if outlook.nothing_to_ask else None


async def _manifest(plan: Plan, client: Client) -> dict[str, Any] | None:
    return await patiently(
        lambda: client.store.manifest(plan.name), patience=None, doing="reading the manifest"
    )


async def _show_while(a_run: Run, name: str) -> RunEnd:
    driving = asyncio.create_task(a_run.drive())
    try:
        if err.is_terminal:
            with Live(
                display.LiveProgress(name, a_run.progress), console=err, refresh_per_second=4
            ):
                return await driving
        while not driving.done():
            await asyncio.wait({driving}, timeout=LINE_SECONDS)
            if not driving.done():
                err.print(display.progress_line(a_run.progress), soft_wrap=True)
        return await driving
    finally:
        await end_tasks([driving])


@contextlib.asynccontextmanager
async def _kept_alive(worker: WorkerProcess | None) -> AsyncIterator[None]:
    """Inside the block the worker is started again when it ends. If that is no use, the block is left with
    the worker's own words."""
    if worker is None:
        yield
        return
    keeper = asyncio.create_task(worker.keep_alive())
    body = asyncio.current_task()
    assert body is not None
    keeper.add_done_callback(lambda task: None if task.cancelled() else body.cancel())
    try:
        yield
    except asyncio.CancelledError:
        if keeper.done() and not keeper.cancelled():
            keeper.result()
        raise
    finally:
        await end_tasks([keeper])


async def _only_model(client: Client) -> str:
    """The model that the live workers serve, once there is a worker."""
    said = False
    while True:
        workers = await patiently(client.store.workers, patience=None, doing="looking for workers")
        if model := _one_model(workers):
            return model
        if not said:
            err.print(
                "no live worker yet, and no --model: waiting for a worker to say what it serves"
            )
        said = True
        await asyncio.sleep(1.0)


def _one_model(workers: list[WorkerInfo]) -> str | None:
    """The model that all these serve; None if there are none. Raises UsageError if there are several."""
    models = sorted({worker.model for worker in workers})
    if len(models) > 1:
        raise UsageError(f"workers serve {', '.join(models)}: choose one with --model")
    return models[0] if models else None
