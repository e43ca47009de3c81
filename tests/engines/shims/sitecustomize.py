"""Run by Python itself at its start, so also in the processes that SGLang spawns."""

import pageable_memory  # noqa: F401
import torchvision_ops  # noqa: F401
