"""The policy loss's kernels compiled ahead of time for chips that this machine does not have: they fit, unspilled."""

import importlib.util
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed; it exists for Linux only")

from dslib.kernels import policy_loss  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

_spec = importlib.util.spec_from_file_location("_compile_tools", Path(__file__).with_name("test_compile.py"))
tools = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tools)

KERNELS = {"rows": policy_loss._rows_kernel, "gradient": policy_loss._gradient_kernel}
#: Logits of a vocabulary that fills whole blocks, and of one that leaves a rest and is no multiple of 16.
LOGITS = {"bfloat16 × 32768": (torch.bfloat16, 32_768), "float32 × 50257": (torch.float32, 50_257)}
SCALARS = ("inverse_temperature", "low", "high", "beta")
#: What the longest of the objectives computes.
OBJECTIVE = {"OBJECTIVE": True, "KIND": 3, "UNBIASED": True, "LIMIT": policy_loss.LIMIT}


def compiled(kernel, chip, dtype, columns, **options):
    """The kernel as the launcher specialises it for logits of ``dtype`` with that many columns."""
    constants = policy_loss._tile(columns) | OBJECTIVE
    launch = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    signature, attributes = {}, {}
    for position, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in SCALARS:
            signature[name] = "fp32"
        elif name in ("columns", "row_stride", "d_row_stride"):
            signature[name] = "i32"
        elif name == "tokens":
            signature[name] = "*i64"
        else:
            signature[name] = "*" + tools.ELEMENT[dtype if name in ("logits", "d_logits") else torch.float32]
        if signature[name].startswith("*") or (signature[name] == "i32" and columns % 16 == 0):
            attributes[(position,)] = [["tt.divisibility", 16]]
    constants = {name: value for name, value in constants.items() if name in signature}
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=tools.CHIPS[chip][0], options={**launch, **options})


@pytest.fixture(autouse=True)
def _not_interpreted():
    if not isinstance(policy_loss._rows_kernel, triton.JITFunction):
        pytest.skip("this process runs Triton's interpreter, which compiles nothing")


@pytest.mark.parametrize("logits", LOGITS)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("chip", tools.CHIPS)
def test_kernel_fits_the_chip_and_spills_no_register(chip, kernel, logits, tmp_path):
    program = compiled(KERNELS[kernel], chip, *LOGITS[logits])
    assert program.metadata.shared <= tools.CHIPS[chip][1]
    assert tools.spilled(program, tmp_path) == 0


def test_spilled_registers_would_be_seen(tmp_path):
    program = compiled(policy_loss._rows_kernel, "sm_80", torch.bfloat16, 32_768, num_warps=1)
    assert tools.spilled(program, tmp_path) > 0
