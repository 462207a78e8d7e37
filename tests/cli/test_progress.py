"""Progress bars, and lines where there is no terminal."""

import re

from rich.console import Console

from eyas.cli.progress import ProgressBars


def test_progress_without_a_terminal_is_a_line_a_step() -> None:
    console = Console(record=True, width=100, force_terminal=False)
    with ProgressBars(console) as bars:
        for done in (0, 2**20, 2**21, 2**21):
            bars("loading target", done, 2**21)
        bars.counter("running")(1, 2)
    text = console.export_text()
    assert re.fullmatch(r"loading target: 2 MiB in \d+\.\d s\n", text)


def test_progress_on_a_terminal_is_a_bar() -> None:
    console = Console(record=True, width=100, force_terminal=True)
    with ProgressBars(console) as bars:
        bars("loading target", 2**20, 2**21)
        bars.counter("running")(1, 2)
    text = console.export_text()
    assert "1.0/2.0 MiB" in text and "1/2" in text
