// SPDX-License-Identifier: Apache-2.0
// A step's inputs: every row that the step reads, the rest of each buffer with its pad value.
#include "common.h"

struct InputsArgs {
  int64_t padded_requests, padded_tokens, pad_slot, block_size, max_len, max_blocks;
  const int64_t *token_ids, *given, *sampled;
  const int32_t* table;
  int64_t *input_ids, *positions, *slots;
  int32_t *query_start_loc, *seq_lens, *state_indices, *block_table;
  int64_t *logits_rows, *sampled_rows;
  int64_t requests, sampling;
  const int64_t *rows, *scheduled;
  const int32_t* states;
  const int64_t *logits_of, *sampled_of;
  int64_t computed[];  // of each request, behind the record
};
// 1, and nothing written, where a request would have more than max_len tokens.
OPERATOR(vc_step_inputs, InputsArgs) {
  int64_t longest = 1;
  for (int64_t r = 0; r < a->requests; r++) longest = std::max(longest, a->computed[r] + a->scheduled[r]);
  if (longest > a->max_len) return 1;
  int64_t columns = (longest + a->block_size - 1) / a->block_size, t = 0;
  a->query_start_loc[0] = 0;
  for (int64_t r = 0; r < a->requests; r++) {
    int64_t row = a->rows[r], end = a->computed[r] + a->scheduled[r];
    const int32_t* blocks = a->table + row * a->max_blocks;
    for (int64_t p = a->computed[r]; p < end; p++, t++) {
      a->input_ids[t] = p < a->given[row] ? a->token_ids[row * a->max_len + p] : a->sampled[row];
      a->positions[t] = p;
      a->slots[t] = blocks[p / a->block_size] * a->block_size + p % a->block_size;
    }
    a->query_start_loc[r + 1] = (int32_t)t;
    a->seq_lens[r] = (int32_t)end;
    a->state_indices[r] = a->states[r];
    std::copy_n(blocks, columns, a->block_table + r * a->max_blocks);
  }
  for (; t < a->padded_tokens; t++) {
    a->input_ids[t] = a->positions[t] = 0;
    a->slots[t] = a->pad_slot;
  }
  for (int64_t r = a->requests; r < a->padded_requests; r++) {
    a->query_start_loc[r + 1] = a->query_start_loc[r];
    a->seq_lens[r] = a->state_indices[r] = 0;
    std::fill_n(a->block_table + r * a->max_blocks, columns, 0);
  }
  std::copy_n(a->logits_of, a->sampling, a->logits_rows);
  std::copy_n(a->sampled_of, a->sampling, a->sampled_rows);
  return 0;
}
