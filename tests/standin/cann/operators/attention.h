// Attention as a formula, softmax(query key^T scale) value, for one sequence after the other: slow and plain.
#pragma once

#include <string>
#include <vector>

#include "descriptors.h"

namespace standin {

// The letters of a layout: T tokens of all sequences one after the other, B sequences padded to one length, S positions
// of a sequence, N heads, D size of a head, H = N D.
struct Attention {
    at::Tensor query;
    at::Tensor key;  // with a block table, blocks of a cache: [blocks, block size, H] or [blocks, N, block size, D]
    at::Tensor value;
    at::Tensor mask;         // true hides; undefined: none
    at::Tensor block_table;  // [B, blocks]; undefined: key and value have the layout of the query
    // TND: where each sequence ends; else how long each is, or one length for all, or nothing: none is padded.
    std::vector<int64_t> query_lengths;
    std::vector<int64_t> key_lengths;  // the same, but always lengths with a block table
    int64_t heads;
    int64_t key_heads;  // 0: as many as heads
    int64_t block_size;
    double scale;
    std::string layout;  // TND, BSH, BSND or BNSD
    int64_t sparse_mode;
    int64_t pre_tokens;  // with next_tokens: how far a mask reaches around the diagonal
    int64_t next_tokens;
    at::Tensor out;
    at::Tensor log_sum_of_exp;  // [B, N, S, 1], TND: [T, N, 1]; a single number, zero, when it is not wanted
    bool wants_log_sum_of_exp;
};

// Throw if the stand-in does not compute this, or CANN documents that it refuses it.
void check(const Attention& attention);

void attend(const Attention& attention);

}  // namespace standin
