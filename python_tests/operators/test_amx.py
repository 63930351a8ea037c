"""The AMX kernels on a simulation of the tile instructions, as most test machines have no AMX.

The tests run the code of the library itself. The tile instructions are replaced by the arithmetic in their description.
"""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import itm_fast.functional as F_itm
from itm_fast import reference
from python_tests.helpers.fragments import random_fragments
from python_tests.helpers.processes import ROOT
from python_tests.helpers.regulators import random_parameters

pytestmark = pytest.mark.shim

KERNELS = sorted((ROOT / "csrc/cpu/kernels/low_precision").glob("*.cpp"))
DRIVERS = sorted((Path(__file__).parents[1] / "native").glob("amx_*.cpp"))


@pytest.fixture(scope="module")
def amx(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
    library = tmp_path_factory.mktemp("amx") / "amx.so"
    command = [compiler, "-std=c++20", "-O2", "-Wno-psabi", "-shared", "-fPIC", "-o", str(library)]
    command += ["-DITM_FAST_ISA=amx", "-DITM_FAST_AMX", "-DITM_FAST_AMX_SIMULATED"]
    command += [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'csrc/include'}", *map(str, [*KERNELS, *DRIVERS])]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return ctypes.CDLL(str(library))


def pointer(tensor):
    assert tensor.is_contiguous()
    return ctypes.c_void_p(tensor.data_ptr())


def sizes(*numbers):
    return [ctypes.c_int64(number) for number in numbers]


def product(amx, parts, rows, columns):
    out = torch.empty(len(rows), len(columns))
    amx.amx_product(
        *sizes(parts), pointer(rows), *sizes(len(rows)), pointer(columns), *sizes(*columns.shape), pointer(out)
    )
    return out


def scores(amx, parts, queries, contexts):
    out = torch.empty(len(queries), len(contexts))
    sides = []
    for side in (queries, contexts):
        sides += [pointer(side.values), pointer(side.offsets.to(torch.int64)), *sizes(len(side))]
    width = sizes(queries.values.shape[1])
    if queries.dtype == torch.bfloat16:
        amx.amx_scores_of_bfloat16(*sides, *width, pointer(out))
    else:
        amx.amx_scores(*sizes(parts), *sides, *width, pointer(out))
    return out


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("n_rows", "n_columns", "dim"), [(1, 1, 1), (32, 32, 32), (45, 70, 33), (33, 31, 600)])
def test_products_of_small_integers_are_exact(amx, parts, n_rows, n_columns, dim):
    # Integers up to 8 are exact in bfloat16, and sums of their products are exact in float32.
    generator = torch.Generator().manual_seed(dim)
    rows = torch.randint(-8, 9, (n_rows, dim), generator=generator).float()
    columns = torch.randint(-8, 9, (n_columns, dim), generator=generator).float()
    assert torch.equal(product(amx, parts, rows, columns), rows @ columns.t())


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("n_rows", "depth", "dim"), [(1, 1, 1), (32, 64, 32), (45, 70, 33), (33, 301, 64)])
def test_rows_are_added_to_what_is_there(amx, parts, transposed, n_rows, depth, dim):
    """The backward multiplies score gradients, or their transpose, by rows."""
    generator = torch.Generator().manual_seed(depth)
    factors = torch.randint(-8, 9, (n_rows, depth), generator=generator).float()
    rows = torch.randint(-8, 9, (depth, dim), generator=generator).float()
    out = torch.randint(-8, 9, (n_rows, dim), generator=generator).float()
    expected = out + factors @ rows
    stored = (factors.t() if transposed else factors).contiguous()
    amx.amx_rows_product(
        *sizes(parts), pointer(stored), *sizes(stored.shape[1], transposed, n_rows, depth), pointer(rows), *sizes(dim),
        pointer(out),
    )  # fmt: skip
    assert torch.equal(out, expected)


def test_two_parts_keep_sixteen_bits(amx):
    generator = torch.Generator().manual_seed(0)
    rows, columns = torch.randn(40, 300, generator=generator), torch.randn(50, 300, generator=generator)
    exact = rows.double() @ columns.double().t()
    scale = rows.double().norm(dim=1)[:, None] * columns.double().norm(dim=1)
    one, two = (((product(amx, parts, rows, columns) - exact).abs() / scale).max().item() for parts in (1, 2))
    assert 1e-4 < one < 2**-8
    assert two < 2e-6


def test_infinities_and_nan_stay_in_their_rows(amx):
    rows = torch.tensor([[torch.inf, 1.0], [torch.nan, 1.0], [2.0, 3.0]])
    columns = torch.tensor([[1.0, 1.0]])
    one, two = (product(amx, parts, rows, columns).flatten() for parts in (1, 2))
    assert one[0] == torch.inf
    assert one[1].isnan()
    assert one[2] == 5.0
    assert two[0].isnan()
    assert two[1].isnan()
    assert two[2] == 5.0


@pytest.mark.parametrize(("parts", "dtype"), [(1, torch.float32), (2, torch.float32), (1, torch.bfloat16)])
def test_scores(amx, parts, dtype):
    words = random_fragments([3, 0, 17, 1, 25, 8], 70, dtype)
    regions = random_fragments([36, 5, 0, 36, 12], 70, dtype, seed=1)
    exact = reference.cross_attention_scores(words.to(torch.float64), regions.to(torch.float64))
    error = (scores(amx, parts, words, regions) - exact).abs().max().item()
    if parts == 2:
        assert error < 1e-6
    elif dtype == torch.bfloat16:
        # Products of bfloat16 numbers are exact in float32, so the scores are as accurate as those of float32.
        plain = F_itm.cross_attention_scores(words.to(torch.float32), regions.to(torch.float32))
        assert error < 2 * (plain - exact).abs().max().item() + 1e-6
    else:
        assert 1e-5 < error < 5e-3


@pytest.mark.parametrize(("parts", "allowed"), [(1, 2e-2), (2, 2e-5)])
@pytest.mark.parametrize(("setting", "steps", "width"), [("rcar2", 2, 20), ("rcar2", 2, 70), ("rar1", 1, 33)])
def test_regulated_scores(amx, parts, allowed, setting, steps, width):
    words = random_fragments([3, 0, 17, 1, 25, 8], 70, torch.float32)
    regions = random_fragments([36, 5, 0, 36, 12], 70, torch.float32, seed=1)
    parameters = random_parameters(setting, 70, width, torch.float32)
    exact = reference.regulated_scores(
        words.to(torch.float64), regions.to(torch.float64), parameters.to(torch.float64), temperature=10.0
    )
    out = torch.zeros(len(words), len(regions))
    sides = []
    for side in (words, regions):
        sides += [pointer(side.values), pointer(side.offsets.to(torch.int64)), *sizes(len(side))]
    tensors = [tensor.contiguous() for tensor in parameters.tensors()]
    weights = (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
    amx.amx_regulated_scores(*sizes(parts), *sides, *sizes(70, steps, width), weights, pointer(out))
    error = (out - exact).abs().max().item()
    assert error < allowed
    assert parts == 2 or error > 1e-5


def test_tanh_is_within_two_units_in_the_last_place(amx):
    """Checked on floats of every exponent; the kernels of RCAR use this tanh."""
    bits = torch.arange(0, 0x7F800000, 4099, dtype=torch.int32)
    values = bits.view(torch.float32)
    values = torch.cat([values, -values, torch.tensor([torch.inf, -torch.inf, torch.nan])])
    values = torch.cat([values, values.new_zeros(-len(values) % 16)])
    out = torch.empty_like(values)
    amx.vector_tanh(pointer(values), *sizes(len(values)), pointer(out))
    exact = values.double().tanh()
    size = exact.abs().float()
    unit = torch.nextafter(size, torch.tensor(2.0)).double() - size.double()
    assert torch.equal(out.isnan(), values.isnan())
    assert float(((out.double() - exact).abs() / unit).nan_to_num(nan=0.0).max()) <= 2
