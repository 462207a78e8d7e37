"""`eyas check` and `eyas audit`: what does not fit, before anything is served."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from eyas.cli.errors import EXIT_FINDINGS
from eyas.cli.flags import engine_flags
from eyas.cli.progress import ProgressBars
from eyas.config import ConfigError, EngineConfig
from eyas.models.embedded import ModelResolutionError, resolve_model
from eyas.types import Finding, Severity

if TYPE_CHECKING:
    from eyas.engine.check_report import CheckReport

Explain = Annotated[
    bool,
    typer.Option("--explain", help="Print the plan: boundaries, shapes, KV layouts, bytes."),
]
DeviceMemory = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        max=1e6,
        help="Plan for GPUs of so many GiB each, whatever this machine has.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]


@engine_flags(without=("acceptance_probe",))  # it needs the weights
def check(
    *,
    config: EngineConfig,
    device_memory: DeviceMemory = None,
    as_json: AsJson = False,
    explain: Explain = False,
) -> int:
    """Check in seconds that target, draft, device and settings fit together.

    Reads no weights. Exits with 2 when something stands in the way, and names all of it.
    """
    if as_json and explain:
        raise ConfigError("--json holds what --explain prints already: leave --explain out")
    report = check_models(config, device_memory=device_memory)
    if as_json:
        print(report.to_json())
    else:
        console = Console(highlight=False)
        report.render(console)
        if explain:
            report.render_explain(console)
    return 0 if report.ok else EXIT_FINDINGS


def check_models(config: EngineConfig, *, device_memory: float | None = None) -> CheckReport:
    """Find both models, without the weights of a hub repository, and check them.

    device_memory: GiB of the devices to plan for, None for those of this machine. A name that
    leads nowhere is a finding among the others.
    """
    missing: list[Finding] = []
    folders: dict[str, Any] = {}
    with ProgressBars() as bars:
        names = {"model": ("target", config.model), "draft": ("draft", config.draft_name)}
        for field, (subject, name) in names.items():
            if name is None:
                folders[field] = None
                continue
            try:
                folders[field] = str(resolve_model(name, weights=False, progress=bars))
            except ModelResolutionError as error:
                code = f"{subject}-not-found"
                missing.append(Finding(Severity.ERROR, code, subject, str(error)))
        from eyas.engine.check import run_check  # heavy: torch

        report = run_check(
            dataclasses.replace(config, **folders),
            device_bytes=None if device_memory is None else int(device_memory * (1 << 30)),
        )
    replaced = {(finding.subject, finding.code) for finding in missing}
    others = [f for f in report.findings if (f.subject, f.code) not in replaced]
    return dataclasses.replace(report, findings=(*missing, *others))


def audit(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A source tree, wheel or sdist of the engine.")
    ],
    *,
    engine: Annotated[Literal["sglang", "vllm"], typer.Option(help="Whose sources these are.")],
    class_name: Annotated[
        str | None, typer.Option("--class", help="Explain one model class instead of all.")
    ] = None,
    as_json: AsJson = False,
    baseline: Annotated[
        Path | None,
        typer.Option(help="A JSON report whose findings are known; only others count."),
    ] = None,
) -> int:
    """Tell which models of another engine lack a part of the EAGLE-3 interface.

    Reads the sources only. Exits with 2 on findings.
    """
    from eyas.audit import run_audit

    return run_audit(path, engine=engine, class_name=class_name, as_json=as_json, baseline=baseline)
