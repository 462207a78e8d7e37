"""The target's answers: the tokens served and generated, in any batch, across interruptions."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from fixtures.tiny_pair import write_pair

from eyas.engine.tokenizer import Tokenizer
from eyas.train.batching import Answer, Job, is_looping, run_jobs
from eyas.train.dataset import Row, read_rows, shard_paths
from eyas.train.engines import BatchEngine, open_engine
from eyas.train.prompts import Prompt
from eyas.train.regenerate import Outcome, Regeneration
from eyas.train.self_prompts import write_self_prompts
from eyas.train.stage_settings import Placement, RegenerateSettings, SelfPromptSettings
from eyas.types import EyasError, FinishReason, SamplingParams, StepOutput

SETTINGS = RegenerateSettings(max_prompt_tokens=90, max_new_tokens=20, shard_size=4)
PROMPTS = [
    *(Prompt((f"the heath {i}",), "ab"[i % 2]) for i in range(10)),
    Prompt(("One.", "Two.", "Three."), "turns"),
    Prompt(("far too long " * 20,), "long"),
]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> BatchEngine:
    target, _ = write_pair(tmp_path_factory.mktemp("pair"))
    return open_engine(
        str(target), placement=Placement(device="cpu"), max_model_len=110, num_requests=8
    )


def regenerate(
    opened: BatchEngine, folder: Path, *, window: int = 9, engine: object = None
) -> Regeneration:
    work = Regeneration(PROMPTS, folder, SETTINGS, target="tiny")
    work.run(engine or opened.engine, opened.tokenizer, opened.template, window=window)
    return work


def answered(opened: BatchEngine, prompt_ids: Sequence[int], params: SamplingParams) -> list[int]:
    """One request alone."""
    found: list[Answer] = []

    def done(answer: Answer) -> list[Job]:
        found.append(answer)
        return []

    assert run_jobs(opened.engine, [Job(prompt_ids, params, done)], window=1)
    return found[0].token_ids


@pytest.fixture(scope="module")
def whole(opened: BatchEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset of an undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    assert regenerate(opened, folder).is_complete
    return folder


def shards(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in shard_paths(folder)]


def test_rows_are_what_was_served_and_generated(opened: BatchEngine, whole: Path) -> None:
    rows = list(read_rows(whole))
    num_checked = 0
    for index, prompt in enumerate(PROMPTS[:10]):
        prompt_ids = opened.tokenizer.render_chat([{"role": "user", "content": prompt.turns[0]}])
        answer = answered(opened, prompt_ids, SETTINGS.params(index))
        mask = [0] * len(prompt_ids) + [1] * len(answer)
        row = Row(prompt_ids + answer, mask, prompt.source)
        assert (row in rows) is not is_looping(answer)
        num_checked += row in rows
    assert num_checked > 3


def test_each_turn_follows_the_targets_own_answer(opened: BatchEngine, whole: Path) -> None:
    rows = [row for row in read_rows(whole) if row.source == "turns"]
    params = SETTINGS.params(10)
    messages: list[dict[str, str]] = []
    for turn, text in enumerate(PROMPTS[10].turns):
        messages.append({"role": "user", "content": text})
        prompt_ids = opened.tokenizer.render_chat(messages)
        if len(prompt_ids) > SETTINGS.max_prompt_tokens:
            break
        assert params.seed is not None
        seeded = dataclasses.replace(params, seed=params.seed + turn)
        ids = prompt_ids + answered(opened, prompt_ids, seeded)
        assert any(row.input_ids[: len(ids)] == ids for row in rows), turn
        messages.append(
            {"role": "assistant", "content": opened.tokenizer.decode(ids[len(prompt_ids) :])}
        )
        if len(ids) - len(prompt_ids) == SETTINGS.max_new_tokens:
            break  # cut: no further turn


def test_the_batch_does_not_show(opened: BatchEngine, whole: Path, tmp_path: Path) -> None:
    regenerate(opened, tmp_path, window=1)
    assert shards(tmp_path) == shards(whole)


def test_it_goes_on_after_an_interruption(opened: BatchEngine, whole: Path, tmp_path: Path) -> None:
    class Interrupted:
        """The engine, for some steps."""

        def __init__(self, num_steps: int) -> None:
            self.left = num_steps
            self.add, self.abort = opened.engine.add, opened.engine.abort

        def step(self) -> list[StepOutput]:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            return opened.engine.step()

    done = []
    for num_steps in (5, 45):
        with pytest.raises(KeyboardInterrupt):
            regenerate(opened, tmp_path, window=4, engine=Interrupted(num_steps))
        done.append(Regeneration(PROMPTS, tmp_path, SETTINGS, target="tiny").num_done)
    assert done[0] == 0 < done[1] < len(PROMPTS)
    written = {path.name: path.stat().st_mtime_ns for path in shard_paths(tmp_path)}
    work = regenerate(opened, tmp_path)
    assert work.is_complete and shards(tmp_path) == shards(whole)
    times = {path.name: path.stat().st_mtime_ns for path in shard_paths(tmp_path)}
    assert written.items() <= times.items()
    complete = Regeneration(PROMPTS, whole, SETTINGS, target="tiny").report()
    assert (work.report().counts, work.report().by_source) == (complete.counts, complete.by_source)


def test_time_can_run_out(opened: BatchEngine, tmp_path: Path) -> None:
    work = Regeneration(PROMPTS, tmp_path, SETTINGS, target="tiny")
    work.run(opened.engine, opened.tokenizer, opened.template, window=4, stop_at=0.0)
    assert work.num_done == 0 and not opened.engine.requests


def test_the_report_counts_everything(whole: Path) -> None:
    report = Regeneration(PROMPTS, whole, SETTINGS, target="tiny").report()
    rows = list(read_rows(whole))
    counts = report.counts
    assert counts[Outcome.TOO_LONG] == 1 and report.num_prompts == len(PROMPTS)
    assert counts[Outcome.ROWS] == len(rows)
    assert counts[Outcome.ANSWER_TOKENS] == sum(row.num_answer_tokens for row in rows)
    assert counts[Outcome.TOKENS] == sum(len(row.input_ids) for row in rows)
    assert sum(report.by_source.values()) == counts[Outcome.KEPT]
    assert f"{counts[Outcome.KEPT]} of 12 conversations kept" in report.line()


def test_a_folder_of_other_answers_is_refused(whole: Path) -> None:
    for prompts, settings, target in (
        (PROMPTS[1:], SETTINGS, "tiny"),
        (PROMPTS, dataclasses.replace(SETTINGS, seed=1), "tiny"),
        (PROMPTS, SETTINGS, "other"),
    ):
        with pytest.raises(EyasError, match="made from other prompts"):
            Regeneration(prompts, whole, settings, target=target)


class ScriptedEngine:
    """Answers by what is last in the prompt: given tokens, two a step, then an end."""

    def __init__(self, answers: dict[int, list[int]]) -> None:
        self.answers, self.live = answers, {}
        self.most_at_once = 0

    def add(self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self.live[request_id] = list(self.answers[prompt_token_ids[-1]])
        self.most_at_once = max(self.most_at_once, len(self.live))

    def step(self) -> list[StepOutput]:
        outputs = []
        for request_id, left in list(self.live.items()):
            new, left[:] = tuple(left[:2]), left[2:]
            reason = None if left else FinishReason.STOP
            outputs.append(StepOutput(request_id, new, reason))
            if not left:
                del self.live[request_id]
        return outputs

    def abort(self, request_id: str) -> None:
        self.live.pop(request_id, None)


def test_jobs_lead_to_jobs_within_the_window() -> None:
    engine = ScriptedEngine({token: [token] * (token + 1) for token in range(9)})
    seen: list[list[int]] = []

    def job(token: int) -> Job:
        def done(answer: Answer) -> list[Job]:
            seen.append(answer.token_ids)
            return [job(token - 4)] if token >= 4 else []

        return Job([token], SamplingParams(), done)

    assert run_jobs(engine, (job(token) for token in range(9)), window=3)
    expected = [*range(9), *range(5), 0]
    assert sorted(map(len, seen)) == sorted(token + 1 for token in expected)
    assert engine.most_at_once == 3 and not engine.live


def test_looping_answers_are_dropped(opened: BatchEngine, tmp_path: Path) -> None:
    text = "the heath"
    ids = opened.tokenizer.encode(text)
    assert not is_looping([*range(8), *range(8)]) and is_looping([*range(8)] * 3)
    assert is_looping([7] * 10) and not is_looping([7] * 9)
    colon = opened.tokenizer.render_chat([{"role": "user", "content": text}])[-1]
    for answer, kept in ((ids * 20, 0), (ids, 2)):
        work = Regeneration(PROMPTS[:2], tmp_path / str(kept), SETTINGS, target="tiny")
        engine = ScriptedEngine({colon: answer})
        report = work.run(engine, opened.tokenizer, opened.template, window=2)
        assert report.counts[Outcome.KEPT] == kept
        assert report.counts[Outcome.LOOPING] == 2 - kept


def test_temperatures_are_mixed() -> None:
    params = [RegenerateSettings().params(i) for i in range(1000)]
    greedy = sum(p.temperature == 0 for p in params)
    assert 250 < greedy < 350
    assert {p.temperature for p in params} == {0.0, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0}
    assert len({p.seed for p in params}) == 1000
    with pytest.raises(EyasError, match="the lower one first"):
        RegenerateSettings(min_temperature=1.0, max_temperature=0.5)


def test_the_target_writes_prompts(opened: BatchEngine, smollm2_dir: Path) -> None:
    """With the real model's template; its answers are scripted."""
    tokenizer = Tokenizer(smollm2_dir)
    from eyas.train.masks import ChatTemplate

    template = ChatTemplate.open(smollm2_dir)
    opening, end = template.user_turn()
    assert template.decode(opening).endswith("<|im_start|>user\n") and template.decode([end]) == (
        "<|im_end|>"
    )
    texts = ["Why is the sky blue?", "why is the SKY blue", "Hi.", "go on " * 40, "What is 2+2?!"]
    answers = iter([[*tokenizer.encode(text), end] for text in texts])

    class Writer(ScriptedEngine):
        def add(
            self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
        ) -> None:
            assert list(prompt_token_ids) == opening and params.stop_token_ids == (end,)
            self.live[request_id] = next(answers)

    written = write_self_prompts(
        Writer({}),
        tokenizer,
        template,
        SelfPromptSettings(count=len(texts), min_characters=5),
        held_out={"what is 2 2"},
        window=2,
    )
    assert [p.turns for p in written.prompts] == [("Why is the sky blue?",)]
    assert written.dropped == {"seen before": 2, "too short or broken": 1, "looping": 1}


def test_the_report_file_names_the_shards(whole: Path) -> None:
    stored = json.loads((whole / "report.json").read_text())
    assert list(stored["shards"]) == [path.name for path in shard_paths(whole)]
