"""The load as `serve` does it: in the engine's process, with all that its parent must know."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eyas.config import EngineConfig
from eyas.engine.engine_process import Loaded
from eyas.engine.stages import StageClock, describe
from eyas.models.embedded import Progress

if TYPE_CHECKING:
    from eyas.engine.engine import Engine


def load_for_serving(config: EngineConfig, progress: Progress) -> tuple[Engine, Loaded]:
    """Check, then load. Raises CheckError with all findings, EyasError for a missing tokenizer."""
    clock = StageClock()
    from eyas.engine.acceptance_probe import probe_acceptance  # heavy: torch
    from eyas.engine.library_logs import adopt_library_logs
    from eyas.engine.load import load_engine, resolve_folders
    from eyas.engine.load_tokenizer import load_tokenizer

    adopt_library_logs()
    clock.lap("import")
    config = resolve_folders(config, progress=progress)
    tokenizer = load_tokenizer(config)
    clock.lap("tokenizer")
    loaded = load_engine(config, progress=progress)
    clock.replace(loaded.seconds)
    engine, report = loaded.engine, loaded.report
    engine.tokenizer = tokenizer
    if config.acceptance_probe:
        chunk_tokens = config.prefill_chunk_tokens
        report = probe_acceptance(engine, tokenizer, report=report, chunk_tokens=chunk_tokens)
        clock.lap("probe")
    worker, runner = engine.worker, engine.worker.runner
    worker.capture(progress=lambda done, total: progress("capturing rounds", done, total))
    if runner.state.device.type == "cpu":  # elsewhere a call returns before its work is done
        engine.stats.watch_parts(runner)
    facts = [f"{label}: {text}" for label, text in report.facts.items()]
    if worker.graphs is not None:
        clock.lap("capture")
        facts.append(f"graphs: {len(worker.graphs)} captured")
    facts.append(f"{report.summary()}; {describe(clock.seconds)}")
    return engine, Loaded(engine.info, loaded.folder, tuple(facts), tuple(report.findings))
