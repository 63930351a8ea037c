"""Argument checks: each error names the argument, the expected and the received value."""

import math

import numpy as np
import pytest
import torch

from itm_fast.reference.validation import (
    INTEGER,
    check_flag,
    check_option,
    check_same_device,
    check_shape,
    check_tensor,
    describe,
    finite_number,
)


def message(error, call, *args, **kwargs):
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    assert caught.type is error
    return str(caught.value)


def test_tensors():
    check_tensor("scores", torch.zeros(2, 3), ("n", "m"))
    check_tensor("index", torch.zeros(2, dtype=torch.int64), ("n",), INTEGER)
    assert (
        message(TypeError, check_tensor, "scores", [[1.0]], ("n", "m"))
        == "scores: expected a tensor of shape (n, m), got [[1.0]] (list)"
    )
    assert (
        message(TypeError, check_tensor, "index", torch.zeros(3), ("n",), INTEGER)
        == "index: expected a tensor of dtype int32 or int64, got a float32 tensor of shape (3,)"
    )
    assert (
        message(ValueError, check_tensor, "index", torch.zeros(3, 1), ("n",))
        == "index: expected shape (n,), got a float32 tensor of shape (3, 1)"
    )
    assert (
        message(TypeError, check_tensor, "scores", torch.zeros(2, 2).to_sparse(), ("n", "m"))
        == "scores: expected a dense tensor, got the layout torch.sparse_coo"
    )


def test_shapes_and_devices():
    tensor = torch.zeros(2, 3)
    check_shape("positives", tensor, (2, 3), "like scores")
    assert (
        message(ValueError, check_shape, "positives", tensor, (3, 3), "like scores")
        == "positives: expected shape (3, 3) like scores, got (2, 3)"
    )
    check_same_device("positives", tensor, "scores", tensor)
    assert (
        message(ValueError, check_same_device, "positives", tensor.to("meta"), "scores", tensor)
        == "positives: expected it on cpu like scores, got meta"
    )


@pytest.mark.parametrize("value", [0.2, 1, np.float32(0.25), np.int64(3)])
def test_finite_numbers_become_floats(value):
    number = finite_number("margin", value)
    assert type(number) is float
    assert number == float(value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float64("nan")])
def test_numbers_that_are_not_finite(value):
    assert (
        message(ValueError, finite_number, "margin", value) == f"margin: expected a finite number, got {float(value)}"
    )


@pytest.mark.parametrize("value", ["0.2", None, True, 1j, torch.tensor(0.2)])
def test_what_is_no_number(value):
    assert message(TypeError, finite_number, "margin", value).startswith("margin: expected a finite number, got ")


def test_bounds_of_numbers():
    assert finite_number("epsilon", 0.0, minimum=0.0) == 0.0
    assert (
        message(ValueError, finite_number, "epsilon", -1, minimum=0.0)
        == "epsilon: expected a number of at least 0, got -1.0"
    )
    assert message(ValueError, finite_number, "t", 0, non_zero=True) == "t: expected a number other than 0, got 0.0"


def test_options():
    check_option("mining", "all", ("all", "hardest"))
    check_option("focal", None, (None, "equal"))
    assert (
        message(ValueError, check_option, "mining", "hard", ("all", "hardest"))
        == "mining: expected one of 'all', 'hardest', got 'hard' (str)"
    )
    assert message(TypeError, check_option, "mining", 3, ("all",)) == "mining: expected one of 'all', got 3 (int)"
    assert (
        message(TypeError, check_option, "mining", ["all"], ("all",))
        == "mining: expected one of 'all', got ['all'] (list)"
    )
    assert (
        message(TypeError, check_option, "mining", None, ("all",))
        == "mining: expected one of 'all', got None (NoneType)"
    )


def test_flags():
    check_flag("halve", False)
    assert message(TypeError, check_flag, "halve", 1) == "halve: expected True or False, got 1 (int)"


def test_descriptions_stay_short():
    assert describe(list(range(1000))).endswith("... (list)")
    assert len(describe("x" * 1000)) < 80


def test_checks_trace_under_compile():
    def checked(scores, margin):
        check_tensor("scores", scores, ("n", "m"))
        check_shape("scores", scores, (scores.shape[0], scores.shape[0]), "square")
        check_same_device("scores", scores, "scores", scores)
        check_option("mining", "all", ("all",))
        check_flag("halve", True)
        return scores * finite_number("margin", margin, minimum=0.0)

    compiled = torch.compile(checked, fullgraph=True, backend="eager", dynamic=True)
    for size, margin in [(2, 0.5), (3, 0.25), (4, 0.125)]:
        torch.testing.assert_close(compiled(torch.ones(size, size), margin), torch.full((size, size), margin))
