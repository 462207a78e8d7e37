"""The settings of Triton's attention by load."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")


class TestSettings:
    """The settings by load: what was timed, and no more shared memory than there is."""

    @staticmethod
    def chosen(num_requests: int, num_rows: int, *, shared_bytes: int = 232_448) -> Any:
        from eyas.kernels.triton_attention_plan import Load, choose_tree_config

        load = Load(
            num_pairs=4 * num_rows,
            num_programs=8 * num_requests,
            num_processors=132,
            shared_bytes=shared_bytes,
        )
        return choose_tree_config(torch.bfloat16, 128, load)

    @pytest.mark.parametrize("num_rows", [1, 4, 16])
    def test_few_programs_are_cut_and_put_together_apart(self, num_rows: int) -> None:
        assert self.chosen(1, num_rows).combine == "apart"
        assert self.chosen(64, num_rows).combine == "last"

    @pytest.mark.parametrize("num_requests", [1, 4, 16, 64])
    @pytest.mark.parametrize("num_rows", [1, 4, 16])
    @pytest.mark.parametrize("shared_bytes", [232_448, 101_376, 65_536])
    def test_steps_fit_shared_memory(
        self, num_requests: int, num_rows: int, shared_bytes: int
    ) -> None:
        config = self.chosen(num_requests, num_rows, shared_bytes=shared_bytes)
        used = (config.num_stages - 1) * config.block_n * 512
        assert used + 48 * 1024 <= shared_bytes
