"""A CPU has no use for Triton, whether it is installed or not."""

import subprocess
import sys

from fixtures.tiny import fresh_backend

from eyas.attention.choice import make_backend
from eyas.attention.torch_backend import TorchBackend
from eyas.contract.attention import KVLayout


def test_a_pool_on_the_cpu_gets_torch() -> None:
    pool = fresh_backend(KVLayout(1, 1, 4, 4), num_pages=1, page_size=2).pool
    assert type(make_backend(pool)) is TorchBackend


def test_triton_is_not_imported_for_it() -> None:
    code = "import sys, eyas.attention.choice; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
