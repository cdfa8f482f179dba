"""RWKV-7's kernel compiled ahead of time for chips that this machine does not have: it fits, and spills nothing."""

import importlib.util
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed; it exists for Linux only")

from dslib.kernels import wkv7  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

_spec = importlib.util.spec_from_file_location("_compile_tools", Path(__file__).with_name("test_compile.py"))
tools = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tools)

KERNELS = {"forward": wkv7._forward_kernel, "backward": wkv7._backward_kernel}
#: What is in float32 whatever the inputs are.
LONG = {"first", "last", "starts", "states", "dlast", "dR", "dW", "dK", "dA", "dB", "dfirst"}
SIZES = ("time", "keys", "values")


def compiled(kernel, chip, dtype, keys, **options):
    """The kernel as the launcher specialises it for heads of ``keys`` × ``keys``, with its options."""
    target = tools.CHIPS[chip][0]
    constants = wkv7._constants(keys) | {"SAVE": True}
    launch = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    signature, attributes = {}, {}
    for position, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        element = torch.float32 if name in LONG else dtype
        signature[name] = "i32" if name in SIZES else "*" + tools.ELEMENT[element]
        if name != "time":
            attributes[(position,)] = [["tt.divisibility", 16]]
    constants = {name: value for name, value in constants.items() if name in signature}
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options={**launch, **options})


@pytest.fixture(autouse=True)
def _not_interpreted():
    if not isinstance(wkv7._forward_kernel, triton.JITFunction):
        pytest.skip("this process runs Triton's interpreter, which compiles nothing")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("chip", tools.CHIPS)
def test_kernel_for_heads_of_64_fits_the_chip_and_spills_no_register(chip, kernel, dtype, tmp_path):
    program = compiled(KERNELS[kernel], chip, dtype, keys=64)
    assert program.metadata.shared <= tools.CHIPS[chip][1]
    assert tools.spilled(program, tmp_path) == 0


def test_spilled_registers_would_be_seen(tmp_path):
    program = compiled(wkv7._backward_kernel, "sm_80", torch.bfloat16, keys=64, maxnreg=64)
    assert tools.spilled(program, tmp_path) > 0
