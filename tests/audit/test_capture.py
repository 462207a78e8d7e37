"""Setters that capture, that capture nothing, and that fail: one small package each."""

import pytest

SET = "set_eagle3_layers_to_capture"
DEAD = f"TestedForCausalLM:{SET}:dead-setter"
BROKEN = f"TestedForCausalLM:{SET}:broken-delegation"

PLAIN = """
def store(decoder, *, ids):
    decoder.layers_to_capture = ids
class PlainModel(nn.Module):
    def __init__(self, config): self.layers = make(config)
    def forward(self, hidden):
        for layer in self.layers: hidden = layer(hidden)
        return hidden
"""


def model(setter: str, *, inner: str = "LlamaModel", extra: str = "") -> str:
    """A model around `inner` with the given body of its setter."""
    body = "\n".join(f"        {line}" for line in setter.split("\n"))
    return f"""{PLAIN}
{extra}
class TestedForCausalLM(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.model = {inner}(config)
        self.logits_processor = LogitsProcessor(config)
    def get_embed_and_head(self): return self.model.weight, self.head
    def {SET}(self, layer_ids=None):
{body}
EntryClass = TestedForCausalLM
"""


@pytest.mark.parametrize(
    "setter",
    [
        "self.model.layers_to_capture = [i + 1 for i in layer_ids]",
        "decoder = self.model\ndecoder.layers_to_capture = layer_ids",
        "setattr(self.model, 'layers_to_capture', layer_ids)",
        "if not self.last_rank: return\nself.flag = True\nself.model.layers_to_capture = layer_ids",
        "self.model.layers_to_capture.extend(layer_ids)",
        "getattr(self, 'model').layers_to_capture = layer_ids",
        "store(self.model, ids=layer_ids)",
    ],
)
def test_setters_that_reach_the_layer_loop(audited, setter):
    seen = audited(model(setter))
    assert seen.verdicts("TestedForCausalLM", SET).popitem()[1] == "captures"
    assert seen.ids == set()


@pytest.mark.parametrize(
    ("setter", "inner"),
    [
        ("self.model.layers_to_capture = layer_ids", "PlainModel"),
        ("self.model.layer_to_capture = layer_ids", "LlamaModel"),
        ("self.layers_to_capture = layer_ids", "LlamaModel"),
        ("self.capture_aux_hidden_states = True", "LlamaModel"),
        ("if hasattr(self.model, 'capture'): self.model.capture(layer_ids)", "PlainModel"),
        ("self.model.layers_to_capture = layer_ids", "LlamaForCausalLM"),
    ],
)
def test_dead_setters(audited, setter, inner):
    seen = audited(model(setter, inner=inner))
    assert seen.ids == {DEAD}
    (finding,) = seen.report.findings
    assert "captures nothing" in finding.message


def test_a_dead_setter_is_explained_by_file_and_line(audited):
    seen = audited(model("self.model.layers_to_capture = layer_ids", inner="PlainModel"))
    (effect,) = [e for e in seen.cls("TestedForCausalLM").effects if e.method == SET]
    assert effect.steps == (
        "sglang/srt/models/tested.py:22: sets layers_to_capture of PlainModel; "
        "never read by its forward",
    )


# The attribute is read, but only by a method that forward does not reach.
UNREACHED = """
class Half(nn.Module):
    def set_layers(self, ids):
        self.layers_to_capture = ids
        for number in self.layers_to_capture:
            setattr(self.layers[number], "captures", True)
    def forward(self, hidden):
        for layer in self.layers:
            if getattr(layer, "captures", False): self.found.append(hidden)
        return hidden
class Overridden(LlamaModel):
    def forward(self, hidden): return self.run(hidden)
    def run(self, hidden): return hidden
class Super(LlamaModel):
    def forward(self, hidden): return super().forward(hidden)
class Helped(LlamaModel):
    def forward(self, hidden): return run_layers(self, hidden)
class Vended(LlamaModel):
    def forward(self, hidden): return vendor.run_layers(self, hidden)
class Batched(LlamaModel):
    def forward(self, hidden): return batching.run_layers(hidden, decoder=self)
def run_layers(decoder, hidden):
    return [hidden for i in decoder.layers_to_capture]
"""


@pytest.mark.parametrize(
    ("setter", "inner", "verdict"),
    [
        ("self.model.layers_to_capture = layer_ids", "Half", "captures nothing"),
        ("self.model.set_layers(layer_ids)", "Half", "captures"),
        ("self.model.layers_to_capture = layer_ids", "Overridden", "captures nothing"),
        ("self.model.layers_to_capture = layer_ids", "Super", "captures"),
        ("self.model.layers_to_capture = layer_ids", "Helped", "captures"),
        ("self.model.layers_to_capture = layer_ids", "Vended", "not followed"),
        ("self.model.layers_to_capture = layer_ids", "Batched", "captures"),
        ("for i in layer_ids: self.model.layers[i].captures = True", "Half", "captures"),
        (
            "for i, one in enumerate(self.model.layers): one.captures = i in layer_ids",
            "Half",
            "captures",
        ),
        ("for layer in self.model.layers: layer.captured = True", "PlainModel", "not followed"),
        ("vendor.capture(self.model, layer_ids)", "LlamaModel", "not followed"),
        ("self.model.layers_to_capture = layer_ids", "vendor.Model", "not followed"),
    ],
)
def test_what_forward_reads(audited, tmp_path, setter, inner, verdict):
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang/batching.py").write_text(
        "def run_layers(hidden, *, decoder):\n    return decoder.layers_to_capture\n"
    )
    imports = "import vendor\nfrom sglang import batching"
    source = model(setter, inner=inner, extra=f"{imports}\n{UNREACHED}")
    assert audited(source).verdicts("TestedForCausalLM", SET).popitem()[1] == verdict


def test_a_call_that_the_inner_model_lacks_fails(audited):
    seen = audited(model(f"self.model.{SET}(layer_ids)"))
    assert seen.ids == {BROKEN}
    assert "which LlamaModel lacks" in seen.report.findings[0].message


@pytest.mark.parametrize(
    "setter",
    [
        "if self.fast:\n    self.model.layers_to_capture = layer_ids\n    return\n"
        "raise NotImplementedError",
        "try:\n    self.model.set_layers_to_capture(layer_ids)\nexcept AttributeError:\n"
        "    self.model.layers_to_capture = layer_ids",
        "if isinstance(self.model, PlainModel):\n    self.model.set_layers_to_capture(layer_ids)\n"
        "else:\n    self.model.layers_to_capture = layer_ids",
        "if isinstance(self.model, (PlainModel, LlamaModel)):\n"
        "    self.model.layers_to_capture = layer_ids\n"
        "else:\n    raise TypeError",
        "self.model.layers_to_capture = layer_ids\nif self.fast:\n"
        "    self.model.set_layers_to_capture(layer_ids)",
    ],
)
def test_what_may_not_happen_is_no_failure(audited, setter):
    seen = audited(model(setter))
    assert seen.verdicts("TestedForCausalLM", SET) == {"LlamaModel": "captures"}
    assert seen.ids == set()


@pytest.mark.parametrize(
    "setter",
    [
        "if not self.last_rank: return\nself.model.set_layers_to_capture(layer_ids)",
        "if not hasattr(self.model, 'set_layers_to_capture'):\n    raise AttributeError",
        "if not isinstance(self.model, PlainModel):\n    raise TypeError",
        "for i in layer_ids:\n    self.model.set_layers_to_capture(i)",
    ],
)
def test_failures_behind_a_condition(audited, setter):
    assert audited(model(setter)).ids == {BROKEN}


def test_a_setter_that_always_raises_fails(audited):
    assert audited(model("ids = layer_ids\nraise RuntimeError(ids)")).ids == {BROKEN}


def test_a_getter_that_delegates_to_a_class_without_it_fails(audited):
    seen = audited("""
        class TestedForCausalLM(nn.Module):
            def __init__(self, config): self.model = LlamaModel(config)
            def get_embed_and_head(self): return self.model.get_embed_and_head()
            def set_eagle3_layers_to_capture(self, ids): self.model.layers_to_capture = ids
        EntryClass = TestedForCausalLM
    """)
    assert seen.ids == {"TestedForCausalLM:get_embed_and_head:broken-delegation"}


@pytest.mark.parametrize("inner", ["LlamaModel", "PlainModel"])
def test_a_guarded_setter_is_judged_by_inner_class(audited, inner):
    """The wrapper asks its inner model, and sets the attribute where the method is not there."""
    setter = (
        "if hasattr(self.model, 'set_layers'): self.model.set_layers(layer_ids)\n"
        "else: self.model.layers_to_capture = layer_ids"
    )
    both = audited(model(setter, inner=f"(Half if config.half else {inner})", extra=UNREACHED))
    expected = "captures" if inner == "LlamaModel" else "captures nothing"
    assert both.verdicts("TestedForCausalLM", SET) == {"Half": "captures", inner: expected}
    assert both.ids == (set() if inner == "LlamaModel" else {DEAD})
