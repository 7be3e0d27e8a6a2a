import os
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():  # before anything imports Triton: its kernels then run in its interpreter
    os.environ["TRITON_INTERPRET"] = "1"

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device: bf16 is wrong in Triton's interpreter, which keeps it as bit patterns")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seed_and_threads():
    torch.manual_seed(0)
    yield


@pytest.fixture
def root():
    return ROOT


def from_transformers(*names):
    """Classes of transformers on their own PyTorch code, also where the GPU packages they would rather call are installed."""
    import transformers

    hidden = ("fla", "mamba_ssm", "causal_conv1d")
    loaded = {name: sys.modules[name] for name in hidden if name in sys.modules}
    sys.modules.update(dict.fromkeys(hidden))  # None: importing them fails, and transformers falls back
    try:
        return [getattr(transformers, name) for name in names]
    finally:
        for name in hidden:
            del sys.modules[name]
        sys.modules.update(loaded)
