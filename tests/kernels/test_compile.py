"""Every kernel compiled ahead of time for chips that this machine does not have: it fits, and spills nothing."""

import re
import subprocess

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed; it exists for Linux only")

from dslib.kernels import symmetric  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

KIB = 1024
#: Target, the shared memory that one program may have there, and what its matrix cores are called.
CHIPS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163 * KIB, "mma.sync"),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 * KIB, "wgmma.mma_async"),
    "sm_100": (GPUTarget("cuda", 100, 32), 227 * KIB, "tcgen05.mma"),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 * KIB, "v_mfma"),
}
ELEMENT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
POINTERS, SCALARS = ("P", "Q", "out"), ("b", "c")
#: The launcher pads everything to multiples of 16.
ALIGNED = (*POINTERS, "rows", "depth", "p_batch", "p_row", "q_batch", "q_row", "o_batch", "o_row")


def compiled(chip, dtype, linear, tile=None, **options):
    """The symmetric kernel as the launcher specialises it."""
    target = CHIPS[chip][0]
    kernel = symmetric._symmetric_kernel
    tile = tile or symmetric.tile_for(dtype, hip=target.backend == "hip")
    constants = {"SIZE": tile.size, "DEPTH": tile.depth, "GROUP": tile.group, "LINEAR": linear}
    constants |= {"PRECISION": "ieee", "UPCAST": False}
    signature, attributes = {}, {}
    for position, name in enumerate(kernel.arg_names):
        signature[name] = "fp32" if name in SCALARS else "*" + ELEMENT[dtype] if name in POINTERS else "i32"
        if name in constants:
            signature[name] = "constexpr"
        elif name in ALIGNED:
            attributes[(position,)] = [["tt.divisibility", 16]]
    options = {"num_warps": tile.warps, "num_stages": tile.stages, **options}
    return triton.compile(ASTSource(kernel, signature, constants, attributes), target=target, options=options)


def spilled(program, folder):
    """Bytes (NVIDIA) or registers (AMD) of one thread that did not fit into its registers."""
    if "amdgcn" in program.asm:
        counts = re.findall(
            r"\.(?:sgpr_spill_count|vgpr_spill_count|private_segment_fixed_size):\s+(\d+)",
            program.asm["amdgcn"],
        )
        assert len(counts) == 3, "the assembly says nothing of spills any more"
        return sum(map(int, counts))
    binary = folder / "kernel.cubin"
    binary.write_bytes(program.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(binary)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    counts = re.search(r"STACK:(\d+) .*LOCAL:(\d+)", usage)
    assert counts, f"cuobjdump says nothing of spills any more: {usage}"
    return sum(map(int, counts.groups()))


@pytest.fixture(autouse=True)
def _not_interpreted():
    if not isinstance(symmetric._symmetric_kernel, triton.JITFunction):
        pytest.skip("this process runs Triton's interpreter, which compiles nothing")


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("dtype", ELEMENT, ids=str)
@pytest.mark.parametrize("chip", CHIPS)
def test_symmetric_kernel_fits_the_chip_and_spills_no_register(chip, dtype, linear, tmp_path):
    _, shared, matrix_cores = CHIPS[chip]
    program = compiled(chip, dtype, linear)
    assert program.metadata.shared <= shared
    assert spilled(program, tmp_path) == 0
    if dtype != torch.float32:  # float32 is multiplied exactly, which NVIDIA's matrix cores do not do
        assert matrix_cores in program.asm["amdgcn" if "amdgcn" in program.asm else "ptx"]


@pytest.mark.parametrize(("chip", "options"), [("sm_80", {"maxnreg": 64}), ("gfx942", {"waves_per_eu": 8})])
def test_spilled_registers_would_be_seen(chip, options, tmp_path):
    tile = symmetric.Tile(128, 64, warps=8, stages=2)
    program = compiled(chip, torch.bfloat16, linear=True, tile=tile, **options)
    assert spilled(program, tmp_path) > 0


def test_too_much_shared_memory_would_be_seen():
    tile = symmetric.Tile(128, 64, stages=8)
    program = compiled("sm_80", torch.bfloat16, linear=False, tile=tile)
    assert program.metadata.shared > CHIPS["sm_80"][1]
