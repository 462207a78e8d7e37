"""Shards of conversations, and prompt files."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from eyas.train.dataset import DatasetError, Row, read_rows, write_shard
from eyas.train.prompts import (
    Prompt,
    PromptError,
    normalised,
    read_prompts,
    refuse_overlap,
    select,
)
from eyas.train.self_prompts import save_prompts

ROWS = [Row([5, 6, 7], [0, 1, 1], "a"), Row([1, 2], [0, 1], "b")]


def test_rows_come_back(tmp_path: Path) -> None:
    assert write_shard(tmp_path / "shard-1.jsonl.gz", ROWS[1:]) == 1
    assert write_shard(tmp_path / "shard-0.jsonl.gz", ROWS[:1]) == 1
    assert list(read_rows(tmp_path)) == ROWS


def test_equal_rows_make_equal_bytes(tmp_path: Path) -> None:
    files = [tmp_path / "x.jsonl.gz", tmp_path / "a" / "new" / "folder" / "y.jsonl.gz"]
    for file in files:
        write_shard(file, ROWS)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_an_unfinished_shard_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> Iterator[Row]:
        yield ROWS[0]
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_shard(tmp_path / "x.jsonl.gz", broken())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"x\.jsonl\.gz:2 is no conversation"),
        ('{"input_ids": [1]}', "x.jsonl.gz:2 is no conversation"),
        ('{"input_ids": [1, 2], "loss_mask": [1]}', "2 input_ids come with 1"),
        ('{"input_ids": [1, 2], "loss_mask": [0, 2]}', "other than 0 and 1"),
        ('{"input_ids": [1, -2], "loss_mask": [0, 1]}', "token ids"),
        ('{"input_ids": [1, 2], "loss_mask": [0, 0]}', "0 everywhere"),
    ],
)
def test_what_is_no_conversation_is_named(tmp_path: Path, line: str, message: str) -> None:
    good = '{"input_ids": [1, 2], "loss_mask": [0, 1]}'
    with gzip.open(tmp_path / "x.jsonl.gz", "wt") as file:
        file.write(f"{good}\n{line}\n")
    with pytest.raises(DatasetError, match=message):
        list(read_rows(tmp_path))


def test_a_folder_without_shards_and_a_cut_one(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="run the stage regenerate first"):
        list(read_rows(tmp_path))
    path = tmp_path / "x.jsonl.gz"
    write_shard(path, ROWS * 50)
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(DatasetError, match="cannot be read"):
        list(read_rows(tmp_path))


def test_prompt_files(tmp_path: Path) -> None:
    lines = [
        {"prompt": "One\u2028line?", "source": "s"},  # a separator of lines for str.splitlines
        {"turns": ["First?", "Then?"]},
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Q?"},
                {"role": "assistant", "content": "not the target's own"},
                {"role": "user", "content": "R?"},
            ]
        },
    ]
    plain, packed = tmp_path / "mine.jsonl", tmp_path / "again.jsonl.gz"
    plain.write_text("".join(json.dumps(x, ensure_ascii=False) + "\n" for x in lines))
    prompts = read_prompts([plain])
    assert prompts == [
        Prompt(("One\u2028line?",), "s"),
        Prompt(("First?", "Then?"), "mine"),
        Prompt(("Q?", "R?"), "mine", "Be brief."),
    ]
    save_prompts(packed, prompts)
    assert read_prompts([packed]) == prompts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("no json\n", "p.jsonl:1 is not valid JSON"),
        ('{"prompt": "a"}\n{"prompt": " "}\n', "p.jsonl:2 is no prompt"),
        ('{"text": "a"}\n', "is no prompt"),
        ('{"turns": []}\n', "is no prompt"),
        ('{"messages": [{"role": "tool", "content": "a"}]}\n', "is no prompt"),
        ("[1]\n", "is no prompt"),
    ],
)
def test_what_is_no_prompt_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(PromptError, match=message):
        read_prompts([path])


def test_evaluation_prompts_are_refused_however_they_are_written() -> None:
    evaluation = [Prompt(("What is 2+2, exactly?",)), Prompt(("Über uns",))]
    refuse_overlap([Prompt(("What is 2+3, exactly?",))], evaluation)
    for copy in ("what is  2 + 2 exactly", "WHAT IS 2+2, EXACTLY?", "u\u0308ber uns!"):
        with pytest.raises(PromptError, match="too: 1 "):
            refuse_overlap([Prompt(("Another one.", copy))], evaluation)
    assert normalised("…") == "" and normalised("Ｔwo  words") == "two words"
    refuse_overlap([Prompt(("+",))], [Prompt(("-",))])


def test_prompts_are_drawn_without_copies() -> None:
    prompts = [Prompt((f"Prompt {i // 2}",)) for i in range(40)]
    chosen, validation = select(prompts, seed=1, num_prompts=10, num_validation=5)
    assert (len(chosen), len(validation)) == (10, 5)
    assert len({p.turns for p in [*chosen, *validation]}) == 15
    assert (chosen, validation) == select(prompts, seed=1, num_prompts=10, num_validation=5)
    assert chosen != select(prompts, seed=2, num_prompts=10, num_validation=5)[0]
    with pytest.raises(PromptError, match="leave none to train on"):
        select(prompts, seed=1, num_prompts=None, num_validation=20)
