"""Records rounds with torch's profiler, as a trace in Chrome's format."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from eyas.bench.trace import ROUND
from eyas.engine.worker import Worker


class MarkedParts:
    """Puts a kernel at the end of each part of a round, so that a trace of a replayed graph shows
    where draft and verify end. Attach it before the first round: graphs hold what was captured."""

    def __init__(self, worker: Worker) -> None:
        if worker.state.device.type == "cuda":
            worker.runner.on_part = self._mark

    def _mark(self, part: str) -> None:
        sleep: Any = torch.cuda._sleep
        sleep(1)  # its kernel's name is trace.MARKER, and nothing else runs it


class Recording:
    """Profiles what runs inside it and writes the trace to `path` when left."""

    def __init__(self, worker: Worker, path: Path) -> None:
        self._worker, self._path = worker, path
        activities = [torch.profiler.ProfilerActivity.CPU]
        self._is_cuda = worker.state.device.type == "cuda"
        if self._is_cuda:
            # Detaching from the driver and attaching again does not go well with graphs.
            os.environ.setdefault("TEARDOWN_CUPTI", "0")
            os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler: Any = torch.profiler.profile(activities=activities, acc_events=True)

    def __enter__(self) -> Recording:
        launch = self._worker.round

        def round(*arguments: Any, **settings: Any) -> Any:
            with torch.profiler.record_function(ROUND):
                return launch(*arguments, **settings)

        self._profiler.start()
        self._worker.round = round  # type: ignore[method-assign]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()
        del self._worker.round  # the method of its class again
        self._profiler.stop()
        if kind is None:
            self._profiler.export_chrome_trace(str(self._path))
