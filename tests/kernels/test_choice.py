"""Which implementation is taken, without running any kernel."""

import subprocess
import sys

import pytest
import torch

from dslib import kernels
from dslib.optim import newton_schulz


@pytest.fixture(autouse=True)
def _leave_no_choice_behind():
    before = kernels.chosen()
    yield
    kernels.use(before)


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(kernels, "_installed", lambda: True)


class Stub:
    """What implementation() looks at, for devices that this machine does not have."""

    def __init__(self, device="cuda", rows=4096, dtype=torch.bfloat16):
        self.device, self.shape, self.dtype = torch.device(device), (1, rows, rows), dtype


def test_choice_holds_for_the_process_until_the_next_and_a_block_gives_it_back(installed):
    assert kernels.chosen() == "auto"
    kernels.use("torch")
    assert kernels.chosen() == "torch"
    with kernels.use("triton"):
        assert kernels.chosen() == "triton"
        with kernels.use("auto"):
            assert kernels.chosen() == "auto"
        assert kernels.chosen() == "triton"
    assert kernels.chosen() == "torch"


def test_block_gives_the_choice_back_after_an_error_too(installed):
    with pytest.raises(KeyError), kernels.use("triton"):
        raise KeyError
    assert kernels.chosen() == "auto"


@pytest.mark.parametrize("choice", ["cuda", "", None, "Triton"])
def test_unknown_choice_is_named_and_changes_nothing(choice):
    with pytest.raises(ValueError, match=r"choice=.*use 'auto', 'triton' or 'torch'"):
        kernels.use(choice)
    assert kernels.chosen() == "auto"


@pytest.mark.parametrize(
    ("stub", "capability", "taken"),
    [
        ({}, (9, 0), "triton"),
        ({"dtype": torch.float16}, (8, 0), "triton"),
        ({"rows": kernels.CROSSOVER}, (9, 0), "triton"),
        ({"rows": kernels.CROSSOVER - 1}, (9, 0), "torch"),
        ({}, (7, 5), "torch"),
        ({"dtype": torch.float32}, (9, 0), "torch"),
        ({"dtype": torch.float64}, (9, 0), "torch"),
        ({"device": "cpu"}, (9, 0), "torch"),
        ({"device": "mps"}, (9, 0), "torch"),
    ],
)
def test_auto_takes_triton_for_large_16_bit_matrices_on_a_gpu_alone(
    monkeypatch, installed, stub, capability, taken
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert kernels.implementation(Stub(**stub)) == taken
    kernels.use("torch")
    assert kernels.implementation(Stub(**stub)) == "torch"


def test_auto_on_rocm_does_not_ask_for_a_compute_capability(monkeypatch, installed):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (0, 0))
    assert kernels.implementation(Stub()) == "triton"


def test_auto_without_triton_is_torch_and_asking_for_it_says_why_not(monkeypatch):
    monkeypatch.setattr(kernels, "_installed", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert kernels.implementation(Stub()) == "torch"
    with pytest.raises(RuntimeError, match="choice='triton', but triton is not installed"):
        kernels.use("triton")


def test_triton_on_a_cpu_without_the_interpreter_says_what_would_do():
    pytest.importorskip("triton", reason="triton is not installed; it exists for Linux only")
    from dslib.kernels import symmetric

    if not hasattr(symmetric._symmetric_kernel, "cache_key"):
        pytest.skip("this process runs Triton's interpreter, where the CPU is no error")
    with kernels.use("triton"), pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        newton_schulz(torch.ones(3, 4))
    assert newton_schulz(torch.ones(3, 4)).isfinite().all()


def test_importing_the_package_imports_neither_torch_nor_triton():
    code = "import sys, dslib.kernels as k; k.use('torch'); print(sorted({'torch', 'triton'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_the_library_works_where_triton_is_not_installed():
    code = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import torch, importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else find(name, *rest)
from dslib import kernels
from dslib.optim import Muon, newton_schulz
assert newton_schulz(torch.eye(3)).isfinite().all()
try:
    kernels.use("triton")
except RuntimeError as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "not installed" in ran.stdout


@pytest.mark.parametrize(
    ("stub", "choice", "taken"),
    [
        ({}, "auto", "triton"),
        ({"rows": 1}, "auto", "triton"),
        ({"dtype": torch.float32}, "auto", "triton"),
        ({"dtype": torch.float64}, "triton", "torch"),
        ({"device": "cpu"}, "auto", "torch"),
        ({"device": "cpu"}, "triton", "triton"),
        ({}, "torch", "torch"),
    ],
)
def test_attention_takes_triton_for_every_dtype_it_holds_and_any_size(
    installed, monkeypatch, stub, choice, taken
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with kernels.use(choice):
        assert kernels.attention_implementation(Stub(**stub)) == taken
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.version, "hip", None)
    with kernels.use("auto"):
        assert kernels.attention_implementation(Stub(**stub)) == "torch"
