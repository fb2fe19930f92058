"""Copies of states between blocks: the state after each token tells where it has to be found."""

from __future__ import annotations

import torch
from standin_ascend import state_copies
from standin_ascend.triton_kernels import TritonKernel

from tests.standin.cann.cann import StandIn
from tests.support.ascend.operators.checks import ANY_FORMAT, assert_equal, draw, make_generator, put

pytestmark = ANY_FORMAT

BLOCK, KEPT, CHANNELS, SIZE = 4, 5, 3, 6  # tokens of a block, inputs that a convolution keeps, and sizes of states
BLOCKS, COLUMNS = 8, 6


def test_bytes_are_copied_from_and_to_addresses(standin: StandIn) -> None:
    source, target = draw(make_generator(0), 4, SIZE), torch.zeros(4, SIZE, dtype=torch.bfloat16).npu()
    states = source.npu()
    rows = [2, 0]
    addresses = [torch.tensor([cache[row].data_ptr() for row in rows]).npu() for cache in (states, target)]
    sizes = torch.tensor([SIZE * 2, SIZE]).npu()
    TritonKernel("memcpy", state_copies.copy_bytes)[(2,)](*addresses, sizes, BLOCK_SIZE=8192)
    expected = torch.zeros(4, SIZE, dtype=torch.bfloat16)
    expected[2], expected[0, : SIZE // 2] = source[2], source[0, : SIZE // 2]
    assert_equal(target, expected)


def test_states_of_accepted_tokens_go_into_the_block_that_they_fill(standin: StandIn) -> None:
    """Of requests with 6, 6 and 9 tokens so far, of which three more are verified, two of them drafts."""
    conv, states = (
        draw(make_generator(seed), BLOCKS, *shape) for seed, shape in enumerate(((KEPT, CHANNELS), (SIZE,)))
    )
    accepted, computed, columns = [2, 1, 3], [6, 6, 9], [1, 1, 3]
    table = torch.stack([torch.randperm(BLOCKS, generator=make_generator(row))[:COLUMNS] for row in range(3)]).int()
    caches, tables = [conv.npu(), states.npu()], table.npu()
    left = torch.tensor(accepted).int().npu()
    counts = put(*(torch.tensor(each).int() for each in (accepted, columns, [3] * 3, computed, [2] * 3)))
    addresses = torch.tensor([cache.data_ptr() for cache in caches]).npu()
    sizes = put(
        *(torch.tensor(each) for each in ([KEPT * CHANNELS * 2, SIZE * 2], [2, 2], [CHANNELS, SIZE], [KEPT, 0]))
    )
    groups, pointer = put(torch.tensor([0, 0]), torch.tensor([tables.data_ptr()]))
    rest = groups, groups, groups, left, None, 3
    kernel = TritonKernel("postprocess", state_copies.keep_accepted)[(3, 2, 1)]
    kernel(*counts, pointer, COLUMNS, addresses, *sizes, *rest, block_size=BLOCK, CONV_STATE_DIM_FIRST=False)
    # The first goes from 6 to 8 tokens, the state after which is that of its first draft: it fills the second block.
    conv[table[0, 1], : KEPT - 1] = conv[table[0, 1], 1:].clone()
    states[table[0, 1]] = states[table[0, 2]]
    # The second goes to 7, and the last to 12: its second draft fills the third block, its states being in the fourth.
    conv[table[2, 2], : KEPT - 2] = conv[table[2, 3], 2:]
    states[table[2, 2]] = states[table[2, 5]]
    assert_equal(caches, [conv, states])
    assert_equal(left, torch.tensor([1, 1, 3]).int())
