"""Run by Python itself at its start, so also in the processes that SGLang spawns."""

import torchvision_ops  # noqa: F401
