"""`eyas train` from prompts to a draft that serves, whole and stage by stage."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from fixtures.chat_templates import FAMILIES, write_tokenizer
from fixtures.checkpoints import TargetShape, write_target
from rich.console import Console
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from eyas.cli import app
from eyas.cli.train import StageBars
from eyas.engine.llm import LLM
from eyas.models.draft_config import read_draft_config
from eyas.models.target_config import read_target_config
from eyas.train.dataset import read_rows, shard_paths, write_shard
from eyas.train.masks import ChatTemplate, conversation_rows
from eyas.train.prompts import read_prompts
from eyas.types import SamplingParams

OPTIONS = (
    "--num-validation 4 --max-prompt-tokens 64 --max-new-tokens 24 --shard-size 8 "
    "--draft-vocab-size 64 --draft-intermediate-size 48 --eval-tokens 12 --tree 3,2,8 "
    "--chain 2 --max-length 128 --tokens-per-step 512 --tokens-per-batch 512 --num-steps 4 "
    "--checkpoint-every 2 "
    "--log-every 1 --num-draft-steps 2 --device cpu"
)


class Folder:
    """A target, prompts, and the command over them."""

    def __init__(self, root: Path) -> None:
        self.root, self.out = root, root / "out"
        self.target = root / "target"
        write_target(self.target, TargetShape(vocab_size=272))
        write_tokenizer(FAMILIES["llama3"], self.target)
        self.prompts = self.write("prompts", [f"question {i}: {i * 7}?" for i in range(30)])
        self.eval = self.write("eval", [f"held out {i}" for i in range(4)])

    def write(self, name: str, texts: list[str]) -> Path:
        path = self.root / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        return path

    def train(self, *more: object, code: int = 0) -> str:
        """Run it; returns what it said, without line breaks."""
        arguments = ["train", self.target, "--out", self.out, *OPTIONS.split(), *more]
        ran = CliRunner().invoke(app, [str(a) for a in arguments], prog_name="eyas")
        assert ran.exit_code == code, ran.stderr or ran.exception
        return " ".join(ran.stderr.split())

    @property
    def all_files(self) -> list[object]:
        return ["--prompts", self.prompts, "--eval-prompts", self.eval]


def times(folder: Path) -> dict[str, int]:
    return {p.name: p.stat().st_mtime_ns for p in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Folder, str]:
    """A finished training, and what it said."""
    folder = Folder(tmp_path_factory.mktemp("trained"))
    return folder, folder.train(*folder.all_files, "--self-prompts", 6)


def test_it_makes_a_draft_that_serves(trained: tuple[Folder, str]) -> None:
    folder, said = trained
    draft = folder.out / "draft"
    config = read_draft_config(draft, read_target_config(folder.target))
    assert (config.format, config.draft_vocab_size) == ("specforge", 64)
    assert config.decoder.intermediate_size == 48
    prompts = ["question", "answer the"]
    params = SamplingParams(max_tokens=20, temperature=0)
    plain = LLM(str(folder.target), device="cpu").generate(prompts, params)
    drafted = LLM(str(folder.target), draft=str(draft), device="cpu").generate(prompts, params)
    assert [o.token_ids for o in drafted] == [o.token_ids for o in plain]
    assert f"eyas serve {folder.target} --draft {draft}" in said


def test_it_says_how_far_things_are(trained: tuple[Folder, str]) -> None:
    folder, said = trained
    for text in (
        "answering prompts: ",
        "conversations kept with",
        "vocabulary of 64 tokens covers",
        "training: 4/4 loss ",
        "step-000002: ",
        "step-000004: ",
        "best checkpoint by acceptance length: step-00000",
        "| mode | 1 |",
        "export: ",
    ):
        assert text in said
    log = [json.loads(x) for x in (folder.out / "training/log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [1, 2, 3, 4]


def test_the_best_checkpoint_is_chosen_in_the_engine(trained: tuple[Folder, str]) -> None:
    folder, _ = trained
    lengths: dict[str, float] = json.loads((folder.out / "validation.json").read_text())["lengths"]
    assert set(lengths) == {"step-000002", "step-000004"}
    best = json.loads((folder.out / "evaluation.json").read_text())["checkpoint"]
    assert lengths[best] == max(lengths.values())
    chosen = folder.out / "training/checkpoints" / best / "model.safetensors"
    assert (folder.out / "draft/model.safetensors").read_bytes() == chosen.read_bytes()


def test_another_checkpoint_of_a_name_is_measured(trained: tuple[Folder, str]) -> None:
    folder, _ = trained
    path = folder.out / "training/checkpoints/step-000002/model.safetensors"
    weights = path.read_bytes()
    tensors = load_file(path)
    tensors["fc.weight"] *= 2
    save_file(tensors, path, metadata={"format": "pt"})
    said = folder.train("--stage", "evaluate", "--eval-prompts", folder.eval)
    assert "validating step-000002" in said and "validating step-000004" not in said
    path.write_bytes(weights)
    folder.train("--stage", "evaluate", "--eval-prompts", folder.eval)
    folder.train("--stage", "export")


def test_the_card_says_how_it_was_made(trained: tuple[Folder, str]) -> None:
    folder, _ = trained
    card = (folder.out / "draft/README.md").read_text()
    assert (folder.out / "evaluation.md").read_text() in card
    num_rows = sum(1 for _ in read_rows(folder.out / "data"))
    assert f"Data: {num_rows} of " in card and "num_draft_steps 2" in card
    assert "| prompts | " in card


def test_nothing_held_out_is_trained_on(trained: tuple[Folder, str]) -> None:
    folder, _ = trained
    chosen = {p.turns for p in read_prompts([folder.out / "prompts.jsonl.gz"])}
    validation = {p.turns for p in read_prompts([folder.out / "validation.jsonl.gz"])}
    assert len(validation) == 4 and chosen.isdisjoint(validation)
    given = {p.turns for p in read_prompts([folder.prompts])}
    assert given <= chosen | validation


def test_again_does_only_what_is_left(trained: tuple[Folder, str], tmp_path: Path) -> None:
    folder, _ = trained
    copy = Folder(tmp_path)
    shutil.rmtree(copy.target)
    shutil.copytree(folder.target, copy.target)
    shutil.copytree(folder.out, copy.out)
    data, checkpoints = copy.out / "data", copy.out / "training/checkpoints"
    shard_paths(data)[1].unlink()
    before, trained_before = times(data), times(checkpoints)
    said = copy.train(*copy.all_files, "--self-prompts", 6)
    after = times(data)
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed == {"report.json", shard_paths(data)[1].name}
    assert times(checkpoints) == trained_before
    assert "validating" not in said and "evaluating: " in said
    originals = [path.read_bytes() for path in shard_paths(folder.out / "data")]
    assert [path.read_bytes() for path in shard_paths(data)] == originals


def test_stages_run_alone_and_name_what_is_missing(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for stage, message in (
        ("vocabulary", "run --stage regenerate first"),
        ("train", "run --stage vocabulary first"),
        ("evaluate", "run --stage train first"),
        ("export", "run --stage evaluate first"),
    ):
        assert message in folder.train("--stage", stage, code=1)
    folder.train(*folder.all_files, "--stage", "regenerate")
    assert "run --stage vocabulary first" in folder.train("--stage", "train", code=1)
    folder.train("--stage", "vocabulary")
    folder.train("--stage", "train")
    assert not (folder.out / "evaluation.json").exists()
    folder.train("--stage", "evaluate", "--eval-prompts", folder.eval)
    folder.train("--stage", "export", "--format", "speculators")
    config = read_draft_config(folder.out / "draft", read_target_config(folder.target))
    assert config.format == "speculators"


def test_evaluation_prompts_are_refused(trained: tuple[Folder, str], tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    copied = folder.write("copied", ["Something else.", "QUESTION 3 : 21"])
    message = "prompts to train on that are in the evaluation file too: 1 ("
    for stage in ("all", "regenerate"):
        files = ["--prompts", folder.prompts, "--eval-prompts", copied]
        assert message in folder.train(*files, "--stage", stage, code=1)
    assert not (folder.out / "data").exists()
    # Trained on already: neither trained further nor evaluated on.
    done, _ = trained
    mine = read_prompts([done.out / "prompts.jsonl.gz"])[0].turns[0]
    again = folder.write("again", [mine])
    for stage in ("train", "evaluate"):
        assert message in done.train("--stage", stage, "--eval-prompts", again, code=1)


def test_a_terminal_gets_bars() -> None:
    console = Console(record=True, width=120, force_terminal=True)
    with StageBars(console) as bars:
        bars.update("training", 3, 10, "loss 1.5, accuracy 0.50 0.40, 900 tok/s")
        bars.say("vocabulary [of] 3 tokens")
    text = console.export_text()
    assert "3/10" in text and "loss 1.5, accuracy 0.50 0.40, 900 tok/s" in text
    assert "vocabulary [of] 3 tokens" in text


def mistakes() -> list[tuple[str, str]]:
    return [
        ("--stage regenerate", "there are no prompts: give --prompts FILE, or --self-prompts N"),
        ("--tree 3,2", "a tree is three numbers"),
        ("--tree 3,2,90", "a tree of depth 3 and topk 2 has between"),
        ("--greedy-share 2", "greedy_share must be between 0 and 1"),
        ("--max-prompt-tokens 600 --self-prompts 2", "the target takes 512 tokens"),
        ("--template-settings [1]", "must be an object"),
        ("--template-settings {", "not valid JSON"),
        ("--num-validation 0", "num_validation must be at least 1"),
        ("--stage bake", "'bake' is not one of"),
    ]


@pytest.mark.parametrize(("options", "message"), mistakes())
def test_mistakes_say_what_to_write(
    trained: tuple[Folder, str], tmp_path: Path, options: str, message: str
) -> None:
    folder, _ = trained
    arguments: list[Any] = ["train", folder.target, "--out", tmp_path, *OPTIONS.split()]
    ran = CliRunner().invoke(app, [str(a) for a in [*arguments, *options.split()]])
    assert ran.exit_code == 1
    assert message in " ".join(ran.stderr.split())


def test_given_conversations_are_trained_on(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    template = ChatTemplate.open(folder.target)
    talks = [
        [
            {"role": "user", "content": f"given question {i}"},
            {"role": "assistant", "content": "Indeed, so."},
        ]
        for i in range(8)
    ]
    rows = [row for talk in talks for row in conversation_rows(template, talk)]
    (folder.out / "data").mkdir(parents=True)
    write_shard(folder.out / "data/own.jsonl.gz", rows)
    folder.train("--stage", "vocabulary")
    mine = folder.write("mine", ["x", "GIVEN question: 5!"])
    assert "in the evaluation file too: 1 (" in folder.train(
        "--stage", "train", "--eval-prompts", mine, code=1
    )
    folder.train("--stage", "train", "--eval-prompts", folder.eval)
    assert "give --eval-prompts" in folder.train("--stage", "evaluate", code=1)
    folder.train("--stage", "evaluate", "--eval-prompts", folder.eval)
    folder.train("--stage", "export")
    assert (
        "1 shard(s) of conversations that existed" in (folder.out / "draft/README.md").read_text()
    )


def test_another_choice_of_prompts_is_refused(trained: tuple[Folder, str]) -> None:
    folder, _ = trained
    other = folder.write("other", ["Another prompt."])
    for more in (["--prompts", other], [*folder.all_files, "--seed", 1]):
        said = folder.train(*more, "--stage", "regenerate", code=1)
        assert "was begun with other prompts" in said
