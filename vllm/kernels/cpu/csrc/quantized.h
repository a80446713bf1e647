// SPDX-License-Identifier: Apache-2.0
// Products with weights that stay quantised.
//
// A matrix lies in panels of NR rows of the weight. A panel is one record for each group of columns: the scales of
// the NR rows, their zeros if there are any, and the codes. Codes come in steps of four columns, so that a 32-bit lane
// holds (the places of) the four codes of one row. GGUF's blocks have a group each: after the scales, float16, minima
// to subtract; where these are but units, integer factors of 16 or 32 columns each; bits past a code's fourth, of all
// steps of a span, after the span's first four.
//
// Two ways to multiply, chosen when the weight is packed, so that a row meets the same arithmetic in every batch:
// - wide: codes become floats in the cache, the register tile of gemm.h multiplies. Exact to float32's roundings.
// - integer: each input row is rounded to int8 in blocks of 16 to 64 columns (as a whole where the weight wants that),
//   the products of a block are summed exactly, and blocks are added up in float32, in rising order.
#pragma once

#include "gemm.h"

enum Format { INT4, INT8, FP8, MXFP4, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K };
enum Rounding { AS_THEY_ARE, TO_INT8, TO_FP8 };

// As Python packs it, 8 bytes a field.
struct Quantized {
  int64_t format, scale_dtype, zeros, activations, integer, N, K;
  int64_t group, block;  // columns that share a scale, and those of them that share one of the inputs; multiples of 16
  const int64_t* order;  // column k meets column order[k] of the inputs; null: k
  const uint8_t* data;

  int64_t groups() const { return (K + group - 1) / group; }
  int64_t padded() const { return groups() * group; }
  int64_t blocks() const { return padded() / block; }
  int64_t scale_bytes() const { return NR * (scale_dtype == FP32 ? 4 : 2); }
  int64_t bits() const {
    if (format == INT8 || format == FP8) return 8;
    return format == Q6_K ? 6 : format == Q5_0 || format == Q5_1 || format == Q5_K ? 5 : 4;
  }
  int64_t step_bytes() const { return NR * bits() / 2; }
  bool minima() const { return format == Q4_1 || format == Q5_1 || format == Q4_K || format == Q5_K; }
  int64_t factors() const { return format == Q6_K ? 16 : format >= Q4_K ? 8 : 0; }  // of a group
  int64_t head_bytes() const {
    return scale_bytes() + (zeros ? NR : 0) + (minima() ? 2 * NR : 0) + factors() * (minima() ? 2 : 1) * NR;
  }
  int64_t record() const { return head_bytes() + group / 4 * step_bytes(); }
  int64_t panel() const { return groups() * record(); }
};

// An input row for integer products: for each block its scale, minus its sum, and what its sums of products start from;
// then the codes.
struct IntegerRow {
  const float *scale, *minus_sum;
  const int32_t* start;
  const int8_t* codes;
  IntegerRow(const char* row, int64_t blocks)
      : scale((const float*)row), minus_sum(scale + blocks), start((const int32_t*)(minus_sum + blocks)),
        codes((const int8_t*)(start + blocks)) {}
  static int64_t bytes(const Quantized& q) { return q.blocks() * 12 + q.padded(); }
};

constexpr int DOT_ROWS = VL == 16 ? 8 : 4;  // most rows of a tile of integer products
constexpr int MOST_PANELS = 4;              // of a tile
// Panels of such a tile: one row of long codes is read from several places at a time, which memory does faster.
constexpr int dot_panels(int rows, int step_bytes) { return rows == 1 && step_bytes == 4 * NR ? MOST_PANELS : 1; }

// C[rows][panels * NR] = `rows` IntegerRows, ldx bytes apart, times panels, at most dot_panels(rows, step_bytes()).
void dot_tile(const Quantized& q, int rows, int panels, const uint8_t* panel, const char* x, int64_t ldx, float* c);
// C[rows][panels * NR] = any number of rows of floats times at most MOST_PANELS panels.
void wide_tiles(const Quantized& q, int rows, int panels, const uint8_t* panel, const float* x, int64_t ldx, float* c);
// One fp32 row, padded with zeros, as an IntegerRow at `out`.
void round_to_int8(const Quantized& q, const float* x, char* out);
// One such row rounded to the grid that the weight's activations name, still as floats.
void round_row(const Quantized& q, float* x);
