"""Bugs in the kernels of layers of 4-bit weights that are held in strips."""

from mutations import Bug


def kernel(name: str) -> str:
    return f"tests/kernels/test_kernels.py -k '[{name}-triton-'"


def triton(file: str, old: str, new: str, name: str) -> Bug:
    return Bug(f"atomc/kernels/triton/{file}.py", old, new, kernel(name))


def pairs(old: str, new: str) -> Bug:
    return Bug(
        "atomc/kernels/triton/w4a16/w4a16_mma_pair.py",
        old,
        new,
        "tests/kernels/linear/test_w4a16_pair.py",
    )


BUGS = [
    pairs("word // 16 * 64 + word % 4 * 16", "word // 16 * 64 + word % 4 * 8"),
    pairs("column + start * 8 < K", "column <= K"),
    pairs(
        "following = group + (start + BLOCK_W) * (128 // GROUP)",
        "following = group + (start + BLOCK_W) * 4",
    ),
    pairs("tl.load(x + 8, here, 0)", "tl.load(x + 2, here, 0)"),
    pairs("word % 4 * 32 // GROUP", "word % 4"),
    triton(
        "w4a16/w4a16_mma_rows", "first + part, PARTS) + tl", "part, PARTS) + tl", "linear_w4a16"
    ),
    triton(
        "w4a16/w4a16_mma_rows",
        "inside & (first + part < PARTS)",
        "inside & (part < PARTS)",
        "linear_w4a16",
    ),
    triton("w4a16/w4a16_mma_rows", "bias if splits == 1 else None,", "bias,", "linear_w4a16"),
    triton("w4a16/w4a16_mma_rows", "sums * E2M1_UNIT", "sums", "linear_mxfp4"),
    Bug(
        "atomc/kernels/triton/w4a16/strip_values.py",
        "True) * E2M1_UNIT",
        "True)",
        "tests/kernels/linear/test_w4a16.py -k e2m1_code",
    ),
    triton("w4a16/w4a16_mma_rows", "(k < K - part * 128)", "(k < K)", "linear_w4a16"),
    triton(
        "w4a16/fragment_products", "(at * BYTES & 3) * 8", "(at * BYTES & 2) * 8", "linear_w4a16"
    ),
    triton(
        "w4a16/fragment_products",
        "_read(zeros_ptr, at, inside, 128 // GROUP)",
        "_read(zeros_ptr, at, inside, 64 // GROUP)",
        "linear_w4a16",
    ),
    triton(
        "w4a16/strip_values",
        "read = tl.program_id(0) * BLOCK_N + fragment_row(place, num_warps)",
        "read = tl.program_id(0) * BLOCK_N + place",
        "linear_w4a16",
    ),
    triton("w4a16/strip_values", "(column < K)", "(column <= K)", "linear_w4a16"),
    Bug(
        "atomc/kernels/triton/w4a16/w4a16_mma.py",
        "if rows % STRIP.value == 0:",
        "if rows % 8 == 0:",
        "tests/kernels/linear/test_w4a16.py -k not_held_in_strips",
    ),
    Bug(
        "atomc/kernels/triton/w4a16/w4a16_mma.py",
        "if num_rows(x) <= MAX_ROWS:\n        return w4a16_mma_rows.multiply(x, *stored, bias, group)",
        "if True:\n        return w4a16_mma_rows.multiply(x, *stored, None, group)",
        kernel("linear_w4a16"),
    ),
]
