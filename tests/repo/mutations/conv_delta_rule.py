"""Bugs in the op of convolution, gates and delta rule, and in packed weights with rows of zeros."""

from mutations import Bug


def decode(old: str, new: str) -> Bug:
    tests = "tests/kernels/recurrent/test_conv_delta_rule.py -k only_the_last_program"
    return Bug("atomc/kernels/triton/recurrent/conv_delta_rule.py", old, new, tests)


def fuse(old: str, new: str) -> Bug:
    return Bug(
        "passes/fuse/conv_delta_rule.py",
        old,
        new,
        "tests/kernels/recurrent/test_conv_delta_rule.py -k apart",
    )


def padded(file: str, old: str, new: str) -> Bug:
    return Bug(file, old, new, "tests/weights/test_padded_weights.py -k 'odd_number or dump'")


def gates(old: str, new: str) -> Bug:
    tests = "tests/kernels/recurrent/test_conv_delta_rule.py -k would_broadcast"
    return Bug("atomc/kernels/triton/recurrent/delta_gates.py", old, new, tests)


BUGS = [
    decode("if arrived == GROUP * tl.num_programs(0) - 1:", "if arrived == 0:"),
    decode("tl.store(arrived_ptr + s * (N // GROUP) + key_head, 0)", "pass"),
    decode("state = tl.load(state_at, inside & remembers, 0.0)", "state = tl.load(state_at, inside, 0.0)"),
    decode("+ channel, inside & remembers, 0.0)", "+ channel, inside, 0.0)"),
    decode("x_at, conv_at, k_channel, key < K", "x_at, conv_at, q_channel, key < K"),
    decode("inside & remembers & (row < TAPS - 2)", "inside & (row < TAPS - 2)"),
    gates("x.dim() != 1 or not known_equal(x.shape[0], a.shape[-1])", "x.shape != A_log.shape"),
    fuse('(attrs["dim"], attrs["start"], attrs["step"]) != (-1, start, 1)', '(attrs["dim"], attrs["step"]) != (-1, 1)'),
    fuse("if outside:", "if False:"),
    padded("passes/merge/linears.py", "-rows % ALIGNED_ROWS", "rows % ALIGNED_ROWS"),
    padded("atomc/weights/inputs.py", "pack(parts, zero_rows)", "pack(parts)"),
    padded("atomc/weights/packed.py", "new_zeros(zero_rows *", "new_zeros(0 *"),
]  # fmt: skip
