"""Bits of masks for allowed_token_ids and bad_words, without a model."""

import numpy as np

from atomc.runtime.constrained.allowed_tokens import AllowedTokens
from atomc.runtime.requests.sampling_params import SamplingParams


def excluded(output, draft=(), **params):
    """The excluded tokens of a vocabulary of 70, after the output and after each draft token."""
    allowed = AllowedTokens(SamplingParams(**params), 70, None)
    mask = np.full((1 + len(draft), 3), 2**32 - 1, np.uint32)
    allowed.exclude(mask, output[-allowed.num_context :] if allowed.num_context else (), draft)
    bits = np.unpackbits(mask.view(np.uint8), axis=-1, bitorder="little")[:, :70]
    return [set(np.flatnonzero(row == 0).tolist()) for row in bits]


def test_the_last_token_of_a_bad_word_is_excluded_after_the_others():
    words = ((5,), (1, 2, 3), (2, 69), (31, 32))
    assert excluded([9, 1, 2], bad_words=words) == [{5, 3, 69}]
    assert excluded([1, 9, 2], bad_words=words) == [{5, 69}]
    assert excluded([], bad_words=words) == [{5}]
    assert excluded([1], (2, 3, 31), bad_words=words) == [{5}, {5, 3, 69}, {5}, {5, 32}]


def test_only_allowed_tokens_have_bits():
    (found,) = excluded([], allowed_token_ids=(0, 31, 32, 69), bad_words=((32,),))
    assert found == set(range(70)) - {0, 31, 69}
