"""`eyas serve`: the OpenAI-compatible server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from eyas.cli.flags import engine_flags, settings_flags
from eyas.config import ConfigError, EngineConfig
from eyas.models.images import ImageLimits


@engine_flags()
@settings_flags("image_limits", ImageLimits)
def serve(
    *,
    config: EngineConfig,
    image_limits: ImageLimits,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for every network.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="The model's name in the API; default: MODEL.")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="EYAS_API_KEY", help="Key that clients must bring; may be repeated."),
    ] = None,
    log_format: Annotated[
        Literal["text", "json"], typer.Option(help="Lines to read, or a JSON object a line.")
    ] = "text",
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="For running requests to end after a signal.")
    ] = 10.0,
    allow_local_images: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Folder of which clients may name images by file: URLs; default: none.",
        ),
    ] = None,
    allow_simulated_acceptance: Annotated[
        bool,
        typer.Option(
            "--allow-simulated-acceptance",
            help="Serve with --simulate-acceptance: answers are not the model's.",
        ),
    ] = False,
) -> int:
    """Check, load and serve a model over an OpenAI-compatible API."""
    if config.simulate_acceptance is not None and not allow_simulated_acceptance:
        raise ConfigError(
            "with --simulate-acceptance the answers are not the model's: leave it out, or add "
            "--allow-simulated-acceptance to serve them all the same"
        )
    from eyas.server import launch  # heavy: FastAPI, and torch behind it

    settings = launch.ServerSettings(
        host=host,
        port=port,
        served_model_name=served_model_name,
        api_keys=tuple(api_key or ()),
        log_format=log_format,
        drain_seconds=drain_seconds,
        image_limits=image_limits,
        allow_local_images=allow_local_images,
    )
    return launch.serve(config, settings)
