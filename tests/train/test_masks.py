"""What is learnt of a conversation: the assistant's tokens, as served, under every template."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from fixtures.chat_templates import FAMILIES, write_tokenizer

from eyas.engine.tokenizer import Tokenizer
from eyas.train.dataset import DatasetError, Row
from eyas.train.masks import ChatTemplate, RowBuilder, conversation_rows

Messages = list[dict[str, Any]]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


TALK = [
    {"role": "system", "content": "Be brief."},
    user("What is in the\n\nbox?"),
    assistant("A cat.\n\nThe cat, I think."),
    user("Alive?"),
    assistant("Yes."),
]
CALL = {"id": "f:0", "function": {"name": "f", "arguments": {"x": 1}}}
OTHER_CALL = {"id": "f:1", "function": {"name": "f", "arguments": {"x": 2}}}
TOOL_TALK = [
    user("Twice, please."),
    assistant("", tool_calls=[CALL, OTHER_CALL]),
    {"role": "tool", "tool_call_id": "f:0", "content": "10"},
    {"role": "tool", "tool_call_id": "f:1", "content": "20"},
    assistant("10 and 20."),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {name: write_tokenizer(family, root / name) for name, family in FAMILIES.items()}


def masked_texts(template: ChatTemplate, rows: Sequence[Row]) -> list[str]:
    """The text of each run of tokens with mask 1."""
    texts = []
    for row in rows:
        run: list[int] = []
        for token, mask in zip([*row.input_ids, 0], [*row.loss_mask, 0], strict=True):
            if mask:
                run.append(token)
            elif run:
                texts.append(template.decode(run))
                run = []
    return texts


def assert_as_served(
    folder: Path,
    template: ChatTemplate,
    messages: Messages,
    rows: Sequence[Row],
) -> None:
    """Before each answer, some row holds exactly what a server feeds the target."""
    tokenizer = Tokenizer(folder)
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = tokenizer.render_chat(messages[:index], template.settings)
            found = [row for row in rows if row.input_ids[: len(prompt)] == prompt]
            assert any(1 in row.loss_mask[len(prompt) : len(prompt) + 6] for row in found), index


def check(
    folder: Path, messages: Messages, answers: list[str], settings: dict[str, Any] | None = None
) -> list[Row]:
    template = ChatTemplate.open(folder, settings)
    rows = conversation_rows(template, messages, source="s")
    assert masked_texts(template, rows) == answers
    assert_as_served(folder, template, messages, rows)
    assert {row.source for row in rows} == {"s"}
    return rows


ANSWERS = ["A cat.\n\nThe cat, I think.", "Yes."]


@pytest.mark.parametrize(
    ("name", "num_rows"), [("llama3", 1), ("deepseek_v3", 1), ("kimi_k2", 1), ("qwen3", 2)]
)
def test_the_mask_is_the_answers(folders: Mapping[str, Path], name: str, num_rows: int) -> None:
    """Qwen3 renders a last answer with (empty) thoughts and an earlier one without: two rows."""
    end = FAMILIES[name].end
    rows = check(folders[name], TALK, [answer + end for answer in ANSWERS])
    assert len(rows) == num_rows


def test_smollm2(smollm2_dir: Path) -> None:
    rows = check(smollm2_dir, TALK, [f"{answer}<|im_end|>" for answer in ANSWERS])
    assert len(rows) == 1
    check(smollm2_dir, TALK[1:], [f"{answer}<|im_end|>" for answer in ANSWERS])  # default system


@pytest.mark.parametrize(
    ("name", "settings"), [("kimi_k25", {"thinking": False}), ("qwen3", {"enable_thinking": False})]
)
def test_thoughts_switched_off(
    folders: Mapping[str, Path], name: str, settings: dict[str, Any]
) -> None:
    check(folders[name], TALK, [f"{answer}<|im_end|>" for answer in ANSWERS], settings)


def test_empty_thoughts_are_not_trained(folders: Mapping[str, Path]) -> None:
    """Kimi's prompt opens the thought, so the answer begins with its end."""
    rows = check(folders["kimi_k25"], TALK, [f"{answer}<|im_end|>" for answer in ANSWERS])
    template = ChatTemplate.open(folders["kimi_k25"])
    assert "<think></think>Yes.<|im_end|>" in template.decode(rows[-1].input_ids)


def test_thoughts_are_trained(folders: Mapping[str, Path]) -> None:
    talk = [user("Why?"), assistant("So.", reasoning_content="Hm, hm.")]
    check(folders["qwen3"], talk, ["<think>\nHm, hm.\n</think>\n\nSo.<|im_end|>"])


def test_parallel_tool_results(folders: Mapping[str, Path]) -> None:
    calls = "\n".join(
        f'<tool_call>\n{{"name": "f", "arguments": {{"x": {x}}}}}\n</tool_call>' for x in (1, 2)
    )
    rows = check(folders["qwen3"], TOOL_TALK, [f"{calls}<|im_end|>", "10 and 20.<|im_end|>"])
    text = ChatTemplate.open(folders["qwen3"]).decode(rows[-1].input_ids)
    assert text.count("<|im_start|>user") == 2 and text.count("<tool_response>") == 2
    thinking = [
        TOOL_TALK[0],
        {**TOOL_TALK[1], "reasoning_content": "Two."},
        *TOOL_TALK[2:],
    ]
    section = "".join(
        f'<|tool_call_begin|>f:{n}<|tool_call_argument_begin|>{{"x": {n + 1}}}<|tool_call_end|>'
        for n in (0, 1)
    )
    called = f"<|tool_calls_section_begin|>{section}<|tool_calls_section_end|>"
    check(
        folders["kimi_k25"],
        thinking,
        [f"Two.</think>{called}<|im_end|>", "10 and 20.<|im_end|>"],
    )


def test_an_answer_that_the_template_changes_is_refused(folders: Mapping[str, Path]) -> None:
    """DeepSeek-R1's prompt opens a thought that its rendering of answers leaves out."""
    template = ChatTemplate.open(folders["deepseek_r1"])
    with pytest.raises(DatasetError, match="let the target write them"):
        conversation_rows(template, [user("Why?"), assistant("So.")])


def test_prompt_tokens_stay_as_served(folders: Mapping[str, Path]) -> None:
    """The header ends in a line break, which would merge with one that begins the answer."""
    template = ChatTemplate.open(folders["qwen3"], {"enable_thinking": False})
    builder = RowBuilder(template, "")
    prompt = template.encode("<|im_start|>assistant\n")
    answer = template.encode("\nSo.<|im_end|>")
    assert template.encode("<|im_start|>assistant\n\nSo.<|im_end|>") != prompt + answer
    builder.add(prompt, answer)
    (row,) = builder.rows()
    assert row.input_ids == prompt + answer
    talk = [user("Why?"), assistant("\n\nSo.")]
    chatml = ChatTemplate.open(folders["kimi_k2"])
    (row,) = conversation_rows(chatml, talk)
    assert masked_texts(chatml, [row]) == ["\n\nSo.<|im_end|>"]


def test_nothing_to_learn_is_refused(folders: Mapping[str, Path]) -> None:
    template = ChatTemplate.open(folders["qwen3"])
    with pytest.raises(DatasetError, match="0 everywhere"):
        Row([1, 2], [0, 0])
    with pytest.raises(DatasetError, match="no assistant's message"):
        conversation_rows(template, [user("Why?")])
    builder = RowBuilder(template, "")
    builder.add(template.encode("<|im_start|>assistant\n"), template.encode("<think>\n\n</think>"))
    with pytest.raises(DatasetError, match="0 everywhere"):
        builder.rows()


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_the_place_where_a_user_writes(folders: Mapping[str, Path], name: str) -> None:
    template = ChatTemplate.open(folders[name])
    opening, end = template.user_turn()
    text = template.text([user("Why?")], for_answer=True)
    assert text.startswith(template.decode(opening) + "Why?" + template.decode([end]))


def test_a_target_without_template_is_refused(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = write_tokenizer(FAMILIES["llama3"], tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    with pytest.raises(Exception, match="no chat template"):
        ChatTemplate(tokenizer)
