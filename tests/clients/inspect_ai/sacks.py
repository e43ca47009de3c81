"""A task with a tool, which alone knows how many sacks a mill has."""

from __future__ import annotations

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver, use_tools
from inspect_ai.tool import Tool, tool


@tool
def sacks() -> Tool:
    async def execute(mill: int) -> str:
        """Count the sacks of a mill.

        Args:
            mill: The number of the mill.
        """
        return str(10 + mill)

    return execute


@solver
def generate_seeded() -> Solver:
    """What tells the epochs apart is in the request, so that it does not matter in which order they ask."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        return await generate(state, seed=state.epoch)

    return solve


@task
def mills(count: int = 8, seeded: bool = False) -> Task:
    samples = [
        Sample(f"How many sacks has mill {mill}?", id=mill, target=str(10 + mill))
        for mill in range(count)
    ]
    last = generate_seeded() if seeded else generate()
    return Task(samples, solver=[use_tools(sacks()), last], scorer=match())
