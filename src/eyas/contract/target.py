"""What speculation needs of a target, declared once, and delegation for models that wrap another.

`Target` is the only declaration. A wrapper (a vision-language model around a language model)
derives from `wrapper_of("language_model")` and gets every member that it does not define itself
by delegation, so that a member added here is delegated the same day (D4). Names are those which
the field uses (SGLang's `get_embed_and_head`, `set_eagle3_layers_to_capture`).

Shape suffixes: T tokens, N rows given, H hidden, F captured features (number of boundaries × H),
V vocabulary.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from eyas.contract.attention import Attention, KVLayout


@dataclasses.dataclass(frozen=True)
class TargetOutput:
    """hidden_TH: after the final norm. features_TF: captured boundaries, lowest first, or None."""

    hidden_TH: Tensor
    features_TF: Tensor | None


@dataclasses.dataclass(frozen=True)
class GivenRows:
    """Rows of a forward whose embedding is given instead of looked up (an image's).

    row_N: int64, which of the T rows. embed_NH: what enters the first layer there (boundary 0).
    """

    row_N: Tensor
    embed_NH: Tensor


class Vocabulary(Protocol):
    """Which ids a rank's logits are of, where several ranks share a vocabulary."""

    @property
    def first(self) -> int:
        """The first id."""

    @property
    def size(self) -> int:
        """How many; the last ranks may have fewer than the others, or none."""

    @property
    def widest(self) -> int:
        """How many the first rank has."""

    def gather(self, logits_TV: Tensor) -> Tensor:
        """Logits of all ids [T, full], the same bytes on every rank."""

    def join(self, x_TC: Tensor) -> Tensor:
        """The ranks' tensors of one shape side by side, the same bytes on every rank."""


class LocalLogits:
    """Logits [T, V] of a rank's ids. part: which these are; None: all."""

    def __init__(self, logits_TV: Tensor, part: Vocabulary | None = None) -> None:
        self.logits_TV, self.part = logits_TV, part
        self._whole_TV = logits_TV if part is None else None

    @property
    def whole_TV(self) -> Tensor:
        """Logits of all ids, gathered when first asked for; every rank must ask for them."""
        if self._whole_TV is None:
            assert self.part is not None
            self._whole_TV = self.part.gather(self.logits_TV)
        return self._whole_TV


class Target(Protocol):
    """The interface of a target model."""

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding table."""

    @property
    def num_layers(self) -> int:
        """Number of decoder layers n; boundaries run from 0 to n."""

    @property
    def kv_layout(self) -> KVLayout:
        """Layout of the target's own keys and values."""

    @property
    def captured_boundaries(self) -> tuple[int, ...]:
        """Boundaries that the next forward captures, ascending."""

    def get_embed_and_head(self) -> tuple[Tensor, Tensor]:
        """(embedding [V, H], head [V, H]), of this rank's ids; shared, not copied."""

    def set_embed_and_head(self, embed_VH: Tensor, head_VH: Tensor) -> None:
        """Replace embedding and head. Raises EyasError if a shape differs."""

    def set_eagle3_layers_to_capture(self, boundaries: Sequence[int]) -> None:
        """Choose the boundaries to capture: boundary i is the residual stream entering layer i,
        n the last block's output before the final norm (D3). Raises EyasError out of 0..n."""

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attention: Attention,
        given: GivenRows | None = None,
    ) -> TargetOutput:
        """One pass over T rows (tokens, positions: int64), some of which may be given."""

    def compute_logits(self, hidden_TH: Tensor) -> Tensor:
        """Logits [T, V] of final-normed hidden states."""

    def compute_local_logits(self, hidden_TH: Tensor) -> LocalLogits:
        """The same, of this rank's ids alone: what is chosen is settled between the ranks (D12)."""


def interface_members(interface: type) -> tuple[str, ...]:
    """Names of all public members that an interface declares or inherits, in that order."""
    names = {
        name: None
        for base in reversed(interface.__mro__)
        if base.__module__ not in ("builtins", "typing")
        for name, value in vars(base).items()
        if not name.startswith("_") and (callable(value) or isinstance(value, property))
    }
    return tuple(names)


def missing_members(model_class: type, interface: type = Target) -> tuple[str, ...]:
    """Members of `interface` that `model_class` lacks (on the class: nothing is instantiated)."""
    return tuple(
        name
        for name in interface_members(interface)
        if _implementation(model_class, name, interface) is None
    )


def _implementation(model_class: type, name: str, interface: type) -> Any:
    """What a class defines under a name, or None; the interface's own stubs and the placeholders
    of torch (nn.Module.forward) are no implementations."""
    for base in model_class.__mro__:
        is_placeholder = base in interface.__mro__ or base.__module__.startswith("torch.")
        if name in vars(base) and not is_placeholder:
            return vars(base)[name]
    return None


def _delegate(inner: str, name: str, declared: Any) -> Any:
    if isinstance(declared, property):
        return property(lambda self: getattr(getattr(self, inner), name), doc=declared.__doc__)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(getattr(self, inner), name)(*args, **kwargs)

    method.__name__ = name
    method.__doc__ = declared.__doc__
    return method


def wrapper_of(inner: str, interface: type = Target) -> type:
    """A base class whose subclasses delegate every undefined interface member to `self.<inner>`.

    The members are read from the interface when a subclass is made, so nothing can be forgotten;
    what the subclass (or a base of it) defines wins. No `__getattr__`: what is delegated can be
    seen on the class, and a member that is absent there is an error at class level.
    """

    class Wrapper:
        inner_model_attribute = inner

        def __init_subclass__(cls, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            for name in missing_members(cls, interface):
                declared = inspect.getattr_static(interface, name)
                setattr(cls, name, _delegate(inner, name, declared))

    return Wrapper
