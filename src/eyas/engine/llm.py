"""Offline use: `LLM("smollm2-135m", draft=...).generate([...], SamplingParams(...))`."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import logging
import reprlib
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas.config import ConfigError, EngineConfig
from eyas.engine.acceptance_probe import probe_acceptance
from eyas.engine.chat_images import EncodedPrompt, encode_chat, load_source, split_messages
from eyas.engine.image_places import NO_IMAGES
from eyas.engine.load import LoadedEngine, load_engine, resolve_folders
from eyas.engine.load_tokenizer import load_tokenizer
from eyas.engine.stop_text import AnswerText
from eyas.models.embedded import Progress
from eyas.types import (
    EyasError,
    FinishReason,
    RequestOutput,
    SamplingParams,
    StepOutput,
    type_mistake,
)

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | EncodedPrompt


class LLM:
    """A model in this process. Settings are EngineConfig's fields.

    draft: None takes the draft that ships with the target, if one does; "none" takes no draft.
    progress: called with (stage, bytes done, bytes in all) while files are fetched and read.
    Raises ConfigError on unknown, mistyped or contradictory settings and CheckError when target,
    draft, device and settings do not fit together; both before weights are read.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        draft: str | Path | None = None,
        progress: Progress | None = None,
        **settings: Any,
    ) -> None:
        config = _config({"model": model, "draft": draft, **settings})
        config = resolve_folders(config, progress=progress)
        self.tokenizer = load_tokenizer(config)
        self._loaded: LoadedEngine = load_engine(config, progress=progress)
        self.engine = self._loaded.engine
        self.engine.tokenizer = self.tokenizer
        self.seconds = self._loaded.seconds
        self.report = self._loaded.report
        self._ids = itertools.count()
        self._told: dict[str, list[StepOutput]] = {}  # by request, until its reader takes it
        if config.acceptance_probe:
            self._probe(config.prefill_chunk_tokens)

    def _probe(self, chunk_tokens: int) -> None:
        """Add to the report, and to the log, what a try of the draft tells."""
        num_known = len(self.report.findings)
        self.report = probe_acceptance(
            self.engine, self.tokenizer, report=self.report, chunk_tokens=chunk_tokens
        )
        for finding in self.report.findings[num_known:]:
            logger.warning("%s", finding)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts (texts or token ids), all in one batch; results in order.

        params: one for all, or one a prompt; default SamplingParams(). With n answers a prompt
        they follow one another (RequestOutput.index).
        """
        many = _as_list(prompts)
        outputs = {int(o.request_id): o for o in self._run(many, _params_for(many, params))}
        return [outputs[request_id] for request_id in sorted(outputs)]

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None
    ) -> RequestOutput:
        """Answer a conversation under the model's chat template.

        A message's content is a text, or a list of {"type": "text", "text": …} and, where the
        model takes images, {"type": "image", "image": …} (a path, a file's bytes or a Pillow
        image). Raises EyasError for an image that cannot be used.
        """
        shown, sources = split_messages(messages)
        vision = self.engine.vision
        if sources and vision is None:
            raise EyasError(NO_IMAGES)
        images = [load_source(source, vision) for source in sources] if vision else []
        prompt = encode_chat(self.tokenizer, shown, images, vision=vision)
        return self.generate([prompt], params)[0]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Iterator[tuple[str, StepOutput]]:
        """Pieces of one answer: (new text, what the engine told), the last with a finish reason.

        Leaving the iterator early aborts the request. Raises EyasError for n > 1.
        """
        params = params or SamplingParams()
        if params.n > 1:
            raise EyasError("stream gives one answer: use generate for n > 1")
        request_id = str(next(self._ids))
        encoded = self._encode(prompt)
        self._add(request_id, encoded, params)
        text = self._text(params, encoded.token_ids)
        try:
            while True:
                for output in self._take([request_id]):
                    yield text.add(output.new_token_ids, output.finish_reason), output
                    if output.finish_reason is not None:
                        return
        finally:
            self._leave(request_id)

    def close(self) -> None:
        """End the processes of further ranks, where there are any: nothing can be asked after."""
        self.engine.worker.close()

    def _add(self, request_id: str, prompt: EncodedPrompt, params: SamplingParams) -> None:
        self.engine.add(request_id, prompt.token_ids, params, prompt.images)
        self._told[request_id] = []

    def _take(self, request_ids: Iterable[str]) -> list[StepOutput]:
        """What became known of these requests; a turn of the engine if nothing has yet.

        Several readers may take turns (streams side by side, an answer within a stream): each
        turn moves all requests, so what it tells is kept for whoever waits for it.
        """
        ids = list(request_ids)
        if not any(self._told[one] for one in ids):
            for output in self.engine.step():
                if output.request_id in self._told:
                    self._told[output.request_id].append(output)
        found: list[StepOutput] = []
        for one in ids:
            found += self._told[one]
            self._told[one] = []
        return found

    def _leave(self, request_id: str) -> None:
        self.engine.abort(request_id)
        self._told.pop(request_id, None)

    def _text(self, params: SamplingParams, prompt: Sequence[int]) -> AnswerText:
        stop_ids = self.engine.stop_ids(params)
        return AnswerText(self.tokenizer, params.stop, stop_ids=stop_ids, after=prompt)

    def _encode(self, prompt: Prompt) -> EncodedPrompt:
        if isinstance(prompt, EncodedPrompt):
            return prompt
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return EncodedPrompt(token_ids)

    def _run(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
    ) -> Iterator[RequestOutput]:
        requests: dict[str, tuple[RequestOutput, SamplingParams]] = {}
        try:
            for prompt, one in zip(prompts, params, strict=True):
                encoded = self._encode(prompt)
                for index, answer in enumerate(_answers(one)):
                    request_id = str(next(self._ids))
                    self._add(request_id, encoded, answer)
                    output = RequestOutput(
                        request_id, encoded.token_ids, [], "", FinishReason.ABORT, index=index
                    )
                    requests[request_id] = output, answer
            while requests:
                for step in self._take(requests):
                    output, answer = requests[step.request_id]
                    output.token_ids += step.new_token_ids
                    output.logprobs += step.logprobs
                    if step.finish_reason is not None:
                        del requests[step.request_id]
                        self._leave(step.request_id)
                        yield self._finish(output, answer, step)
        finally:
            for request_id in requests:
                self._leave(request_id)

    def _finish(
        self, output: RequestOutput, params: SamplingParams, step: StepOutput
    ) -> RequestOutput:
        assert step.finish_reason is not None
        return dataclasses.replace(
            output,
            text=self._text(params, output.prompt_token_ids).add(
                output.token_ids, step.finish_reason
            ),
            finish_reason=step.finish_reason,
            num_rounds=step.num_rounds,
            num_round_tokens=step.num_round_tokens,
            num_cached_tokens=step.num_cached_tokens,
            accepted_counts=step.accepted_counts,
            error=step.error,
        )


def _answers(params: SamplingParams) -> list[SamplingParams]:
    """One request an answer; answer i has seed + i, so that each can be had again alone."""
    if params.n == 1:
        return [params]
    seeds = [None if params.seed is None else params.seed + i for i in range(params.n)]
    return [dataclasses.replace(params, n=1, seed=seed) for seed in seeds]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | EncodedPrompt) or _is_token_list(prompts):
        return [prompts]  # type: ignore[list-item]
    if isinstance(prompts, Sequence) and all(
        isinstance(prompt, str | EncodedPrompt) or _is_token_list(prompt) for prompt in prompts
    ):
        return list(prompts)  # type: ignore[arg-type]
    text = "prompts must be a text, a list of token ids, or a list of texts or of such lists"
    raise EyasError(f"{text}, not {reprlib.repr(prompts)}")


def _is_token_list(value: object) -> bool:
    return value != [] and type_mistake(tuple[int, ...], value) is None


def _params_for(
    prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    if not (isinstance(params, Sequence) and all(isinstance(p, SamplingParams) for p in params)):
        raise EyasError(f"params must be SamplingParams, or one a prompt, not {params!r}")
    if len(params) != len(prompts):
        raise EyasError(f"{len(prompts)} prompts came with {len(params)} sampling params")
    return list(params)


def _config(given: dict[str, Any]) -> EngineConfig:
    kinds = typing.get_type_hints(EngineConfig)
    settings: dict[str, Any] = {
        name: str(value) if isinstance(value, Path) else value for name, value in given.items()
    }
    for name, value in settings.items():
        if name not in kinds:
            near = difflib.get_close_matches(name, kinds, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"unknown setting {name!r}{hint} (known: {', '.join(kinds)})")
        if text := type_mistake(kinds[name], value):
            raise ConfigError(f"{name} must be {text}, not {value!r}")
    return EngineConfig(**settings)
