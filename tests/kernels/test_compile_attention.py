"""The kernels of sparse attention compiled ahead of time for chips that this machine does not have.

What is compiled is what a launcher would launch there: its tiles, its constants, the numbers it knows.
"""

import importlib.util
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed; it exists for Linux only")

from dslib.kernels import block_sparse, indexer, sliding_window, sparse_mqa  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

_spec = importlib.util.spec_from_file_location("_compile_tools", Path(__file__).with_name("test_compile.py"))
tools = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tools)

ELEMENT = tools.ELEMENT | {torch.int32: "i32", torch.int64: "i64"}


@pytest.fixture(autouse=True)
def _not_interpreted():
    if not isinstance(indexer._scores_kernel, triton.JITFunction):
        pytest.skip("this process runs Triton's interpreter, which compiles nothing")


class Recorder:
    """Stands in a module for its kernel, and keeps what a launcher would launch."""

    def __init__(self, kernel, launches):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.launches.append((self.kernel, arguments, options))


@pytest.fixture
def launches(monkeypatch):
    """What a call of a module launches on a chip: its launcher runs on meta tensors, which have no memory."""

    def record(chip, module, call):
        found = []
        for name, kernel in list(vars(module).items()):
            if isinstance(kernel, triton.JITFunction):
                monkeypatch.setattr(module, name, Recorder(kernel, found))
        monkeypatch.setattr(torch.version, "hip", "6.4" if tools.CHIPS[chip][0].backend == "hip" else None)
        call()
        return found

    return record


def compiled_launch(chip, kernel, arguments, options):
    """``kernel`` as this launch specialises it: by dtypes, by numbers that are 1, and by multiples of 16."""
    values = dict(zip(kernel.arg_names, arguments, strict=False)) | options
    options = {name: values.pop(name) for name in options if name not in kernel.arg_names}
    signature, constants, attributes = {}, {}, {}
    for position, parameter in enumerate(kernel.params):
        name, value = parameter.name, values[parameter.name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + ELEMENT[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32" if value < 2**31 else "i64"
        if isinstance(value, torch.Tensor) or (signature[name] in ("i32", "i64") and value % 16 == 0):
            attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=tools.CHIPS[chip][0], options=options)


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)


def there_and_back(function, *tensors):
    def call():
        out = function(*tensors)
        torch.autograd.grad(out, tensors, torch.empty_like(out))

    return call


CHOSEN, OWN = meta(2, 4, 4096, 16, dtype=torch.int64), meta(2, 32, 4096, 4, dtype=torch.int64)
SELECTED = meta(2, 4096, 2048, dtype=torch.int64)
ALL = tuple(tools.CHIPS)
#: Sizes of published models, or of our own: the module, a call of it, how many kernels it launches, and the chips.
LAUNCHES = {
    "window, 32 and 8 heads of 128": (
        sliding_window,
        there_and_back(
            lambda q, k, v: sliding_window.sliding_window(q, k, v, 512),
            *(meta(2, heads, 4096, 128) for heads in (32, 8, 8)),
        ),
        3,
        ALL,
    ),
    "window, 16 heads of 64": (
        sliding_window,
        there_and_back(
            lambda q, k, v: sliding_window.sliding_window(q, k, v, 512),
            *(meta(2, 16, 4096, 64, dtype=torch.float16) for _ in range(3)),
        ),
        3,
        ("sm_90",),
    ),
    "NSA's selection, 64 heads in 4 groups": (
        block_sparse,
        there_and_back(
            lambda q, k, v: block_sparse.block_sparse(q, k, v, CHOSEN, 64),
            *(meta(2, heads, 4096, 128) for heads in (64, 4, 4)),
        ),
        3,
        ALL,
    ),
    "MoBA, 32 heads of 128": (
        block_sparse,
        there_and_back(
            lambda q, k, v: block_sparse.block_sparse(q, k, v, OWN, 512),
            *(meta(2, 32, 4096, 128, dtype=torch.float16) for _ in range(3)),
        ),
        3,
        ("sm_100", "gfx942"),
    ),
    "DeepSeek's MQA, 128 heads of 512 + 64": (
        sparse_mqa,
        there_and_back(
            lambda q, kv: sparse_mqa.sparse_mqa(q, kv, SELECTED, 512),
            meta(2, 128, 4096, 576),
            meta(2, 4096, 576),
        ),
        2,
        ALL,
    ),
    "MQA of 64 + 32": (
        sparse_mqa,
        there_and_back(
            lambda q, kv: sparse_mqa.sparse_mqa(q, kv, SELECTED, 64),
            meta(2, 16, 4096, 96, dtype=torch.float16),
            meta(2, 4096, 96, dtype=torch.float16),
        ),
        2,
        ("sm_80", "gfx942"),
    ),
    "scores of DeepSeek's indexer, 64 heads of 128": (
        indexer,
        there_and_back(
            indexer.indexer_scores_triton, meta(2, 4096, 64, 128), meta(2, 4096, 128), meta(2, 4096, 64)
        ),
        3,
        ALL,
    ),
    "the most of the best keys that its kernel holds": (
        indexer,
        lambda: indexer.indexer_topk(
            meta(2, 4096, 64, 128), meta(2, 4096, 128), meta(2, 4096, 64), indexer.FUSED_TOP_K
        ),
        1,
        ALL,
    ),
    "scores of an indexer of 4 heads of 32": (
        indexer,
        there_and_back(
            indexer.indexer_scores_triton,
            *(meta(2, 4096, *s, dtype=torch.float16) for s in ((4, 32), (32,), (4,))),
        ),
        3,
        ("sm_90", "gfx942"),
    ),
}


@pytest.mark.parametrize(
    ("sizes", "chip"), [(sizes, chip) for sizes, (*_, chips) in LAUNCHES.items() for chip in chips]
)
def test_attention_kernels_fit_the_chip_and_spill_no_register(launches, chip, sizes, tmp_path):
    module, call, count, _ = LAUNCHES[sizes]
    found = launches(chip, module, call)
    assert len(found) == count
    for kernel, arguments, options in found:
        program = compiled_launch(chip, kernel, arguments, options)
        assert program.metadata.shared <= tools.CHIPS[chip][1], kernel.fn.__name__
        assert tools.spilled(program, tmp_path) == 0, kernel.fn.__name__
        # A tile of few rows is multiplied by the older of a chip's matrix instructions; mma is part of every name.
        assert "v_mfma" in program.asm["amdgcn"] if "amdgcn" in program.asm else "mma" in program.asm["ptx"]
