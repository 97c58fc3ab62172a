"""Peak memory of a piece of work, from the allocator's own events.

The profiler reports every allocation and release of PyTorch's CPU allocator, so pieces held inside
a sharded tensor count like any other tensor.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# The profiler announces itself, and every block it did not see being allocated, otherwise.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass
class Peak:
    """Largest sum of live bytes allocated since the measurement began."""

    bytes: int = 0


@contextmanager
def peak_memory() -> Iterator[Peak]:
    """Measure the body's peak of live allocations; what was allocated before does not count.

    On CUDA the caching allocator's own counters are read instead.
    """
    peak = Peak()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated() - before
        return
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield peak
    results = profiler.profiler.kineto_results
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in results.events()
        if event.name() == "[memory]"
    )
    live = 0
    for _, change in changes:
        live += change
        peak.bytes = max(peak.bytes, live)
