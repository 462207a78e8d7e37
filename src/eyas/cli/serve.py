"""`eyas serve`: the OpenAI-compatible server."""

from __future__ import annotations

from typing import Annotated

import typer

from eyas.cli.flags import engine_flags
from eyas.config import EngineConfig


@engine_flags()
def serve(
    *,
    config: EngineConfig,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for every network.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="The model's name in the API; default: MODEL.")
    ] = None,
) -> int:
    """Check, load and serve a model over an OpenAI-compatible API."""
    from eyas.server import launch  # heavy: FastAPI, and torch behind it

    return launch.serve(config, host=host, port=port, served_model_name=served_model_name)
