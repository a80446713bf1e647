// SPDX-License-Identifier: Apache-2.0
// The register-tile kernel that linear layers, experts and attention share.
//
// C[r][n] = sum over k of A[r][k] * B[k][n]: A is fp32, row-major; B lies in panels of NR columns. Each element of C is
// one chain of fused multiply-adds in rising k, whatever the tile it falls in: so a row's result depends neither on the
// number of rows nor on its place among them.
//
// Panel of fp32 and fp16: [K][NR]. Panel of bf16: [K/2][NR][2], the two k of a column in one 32-bit word, so that one
// load and one shift or mask make a register of floats; an odd K is padded with a zero.
#pragma once

#include "common.h"

constexpr int NP_MAX = 4;  // panels of one tile

template <class W> constexpr int64_t padded_k(int64_t K) { return sizeof(W) == 2 && std::is_same_v<W, bf16> ? (K + 1) / 2 * 2 : K; }
constexpr int panels_of_tile(int rows) {
  int n = MR_MAX / rows;
  return n < 1 ? 1 : n > NP_MAX ? NP_MAX : n;
}

template <class W, int MR, int NP>
void tile_kernel(int64_t K, const float* __restrict a, int64_t lda, const W* __restrict b, int64_t panel,
                 float* __restrict c, int64_t ldc, bool add) {
  vf acc[MR][NP * 2];
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
    for (int j = 0; j < NP * 2; j++) acc[r][j] = add ? load(c + r * ldc + j * VL) : vf{};

  if constexpr (std::is_same_v<W, bf16>) {
    for (int64_t k = 0; k < K; k += 2) {
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; odd++) {
        vf w[NP * 2];
#pragma GCC unroll 8
        for (int j = 0; j < NP * 2; j++) {
          vu pair = load_bits<vu>(b + (j / 2) * panel + k * NR + (j % 2) * VL * 2);
          w[j] = (vf)(odd ? pair & 0xffff0000u : pair << 16);
        }
#pragma GCC unroll 16
        for (int r = 0; r < MR; r++) {
          vf x = splat(a[r * lda + k + odd]);
#pragma GCC unroll 8
          for (int j = 0; j < NP * 2; j++) acc[r][j] = fma(x, w[j], acc[r][j]);
        }
      }
    }
  } else {
    for (int64_t k = 0; k < K; k++) {
      vf w[NP * 2];
#pragma GCC unroll 8
      for (int j = 0; j < NP * 2; j++) w[j] = load(b + (j / 2) * panel + k * NR + (j % 2) * VL);
#pragma GCC unroll 16
      for (int r = 0; r < MR; r++) {
        vf x = splat(a[r * lda + k]);
#pragma GCC unroll 8
        for (int j = 0; j < NP * 2; j++) acc[r][j] = fma(x, w[j], acc[r][j]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
    for (int j = 0; j < NP * 2; j++) store(c + r * ldc + j * VL, acc[r][j]);
}

// Any rows in 1..MR_MAX and panels in 1..panels_of_tile(rows); K is padded_k.
template <class W, int MR = MR_MAX, int NP = panels_of_tile(MR)>
INLINE void tile(int rows, int panels, int64_t K, const float* a, int64_t lda, const W* b, int64_t panel, float* c,
                 int64_t ldc, bool add) {
  if (rows == MR) {
    if (panels == NP) tile_kernel<W, MR, NP>(K, a, lda, b, panel, c, ldc, add);
    else if constexpr (NP > 1) tile<W, MR, NP - 1>(rows, panels, K, a, lda, b, panel, c, ldc, add);
  } else if constexpr (MR > 1) {
    tile<W, MR - 1>(rows, panels, K, a, lda, b, panel, c, ldc, add);
  }
}

// Splits `rows` into tiles of nearly equal height: fn(first row, rows).
template <class F> INLINE void for_tiles(int64_t rows, F&& fn) {
  int64_t n = (rows + MR_MAX - 1) / MR_MAX;
  for (int64_t i = 0; i < n; i++) {
    int64_t r0 = rows * i / n, r1 = rows * (i + 1) / n;
    fn(r0, (int)(r1 - r0));
  }
}

// One row to fp32, zero up to `padded`.
template <class T> INLINE void widen_row(const T* x, int64_t K, int64_t padded, float* out) {
  int64_t k = 0;
  for (; k + VL <= K; k += VL) store(out + k, load(x + k));
  for (; k < K; k++) out[k] = to_float(x[k]);
  for (; k < padded; k++) out[k] = 0;
}
