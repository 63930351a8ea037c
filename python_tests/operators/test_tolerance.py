"""The tolerance helper passes correct results and fails wrong ones."""

import pytest
import torch

from python_tests.helpers.tolerance import DRAWS, assert_as_accurate, assert_close_to_exact, max_error

NAN, INF = float("nan"), float("inf")


def exact(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_max_error_is_the_largest_absolute_difference():
    assert max_error(torch.tensor([1.0, 2.5, -3.0]), exact(1.0, 2.25, -3.125)) == 0.25


def test_max_error_of_nothing_is_zero():
    assert max_error(torch.empty(0, 3), torch.empty(0, 3, dtype=torch.float64)) == 0.0


@pytest.mark.parametrize("special", [NAN, INF, -INF])
def test_special_values_must_stand_in_the_same_places(special):
    assert max_error(torch.tensor([1.0, special]), exact(1.0, special)) == 0.0
    assert max_error(torch.tensor([1.0, 2.0]), exact(1.0, special)) == INF
    assert max_error(torch.tensor([1.0, special]), exact(1.0, 2.0)) == INF


def test_infinities_must_agree_in_sign():
    assert max_error(torch.tensor([INF]), exact(-INF)) == INF


def test_shapes_and_dtypes_are_compared():
    with pytest.raises(AssertionError, match="float64"):
        max_error(torch.zeros(2), torch.zeros(2))
    with pytest.raises(AssertionError, match="shape"):
        max_error(torch.zeros(2), torch.zeros(1, 2, dtype=torch.float64))
    with pytest.raises(AssertionError, match="dtype"):
        assert_close_to_exact(torch.zeros(1), torch.zeros(1, dtype=torch.float64), exact(0.0))


def test_twice_the_error_of_plain_pytorch_is_the_limit():
    truth = exact(0.0, 1.0)
    plain = torch.tensor([0.0, 1.01])
    assert_close_to_exact(torch.tensor([0.0, 1.0199]), plain, truth)
    with pytest.raises(AssertionError, match=r"scores: error 2\.1\d*e-02 against float64"):
        assert_close_to_exact(torch.tensor([0.0, 1.0211]), plain, truth, name="scores")


def test_a_floor_stands_where_plain_pytorch_is_exact():
    truth = exact(1.0)
    plain = torch.tensor([1.0])
    eps = torch.finfo(torch.float32).eps
    assert_close_to_exact(torch.tensor([1.0 + 3 * eps]), plain, truth)
    with pytest.raises(AssertionError):
        assert_close_to_exact(torch.tensor([1.0 + 6 * eps]), plain, truth)
    assert_close_to_exact(torch.tensor([1.5]), plain, truth, floor=0.5)


def test_nan_fails():
    with pytest.raises(AssertionError, match="inf"):
        assert_close_to_exact(torch.tensor([NAN]), torch.tensor([1.0]), exact(1.0))


def test_the_largest_of_many_draws_is_the_measure():
    """If plain PyTorch is exact by chance, perturbing the last digit of its inputs shows its rounding error."""
    x = torch.tensor([1.0, 1.0 + 2**-20])
    eps = torch.finfo(torch.float32).eps

    def difference(move):
        a, b = move(x).double()
        return [((b - a) * 2**20).float()[None]]

    for error in (0.0, 0.5, -0.5):
        assert_as_accurate([torch.tensor([1.0 + error])], [difference], [exact(1.0)], names=["result"])
    # Both values move by one eps; twice the resulting error is allowed.
    assert 2 * 2 * eps * 2**20 == 0.5
    with pytest.raises(AssertionError, match=rf"result: error 5\.1\d+e-01 .* by {DRAWS} draws"):
        assert_as_accurate([torch.tensor([1.51])], [difference], [exact(1.0)], names=["result"])


def test_every_form_and_every_result_counts():
    forms = [
        lambda _: [torch.tensor([1.0]), torch.tensor([2.0])],
        lambda _: [torch.tensor([1.01]), torch.tensor([2.0])],
    ]
    truth = [exact(1.0), exact(2.0)]
    names = ["scores", "gradients"]
    assert_as_accurate([torch.tensor([1.0199]), torch.tensor([2.0])], forms, truth, names=names)
    for wrong in ((1.0, 2.01), (1.0, NAN)):
        with pytest.raises(AssertionError, match=r"^gradients: error "):
            assert_as_accurate([torch.tensor([value]) for value in wrong], forms, truth, names=names)
    with pytest.raises(AssertionError, match=r"^scores: error "):
        assert_as_accurate([torch.tensor([1.021]), torch.tensor([2.0])], forms, truth, names=names)
    with pytest.raises(AssertionError, match="expected the dtypes of plain PyTorch"):
        assert_as_accurate([value.to(torch.bfloat16) for value in forms[0](None)], forms, truth, names=names)
