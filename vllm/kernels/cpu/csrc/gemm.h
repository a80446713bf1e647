// SPDX-License-Identifier: Apache-2.0
// The register-tile kernel that linear layers, experts and attention share.
//
// C[r][n] = sum over k of A[r][k] * B[k][n]: A is fp32, row-major; B lies in panels of NR columns. Each element of C is
// one chain of fused multiply-adds in rising k, whatever the tile it falls in: so a row's result depends neither on the
// number of rows nor on its place among them. Where the processor multiplies pairs of bf16 (AVX512_BF16), A may be bf16
// with a bf16 B; such a chain takes the two k of a word at once, and so rounds differently from that of a fp32 A.
//
// Panel of fp32 and fp16: [K][NR]. Panel of bf16: [K/2][NR][2], the two k of a column in one 32-bit word, so that one
// load and one shift or mask make a register of floats; K is padded with zeros.
#pragma once

#include "common.h"

constexpr int NP_MAX = 4;  // panels of one tile

// K of a panel; weights take `unit` 32, so that the matrix unit finds whole tiles.
template <class W> constexpr int64_t padded_k(int64_t K, int64_t unit = 2) {
  return std::is_same_v<W, bf16> ? (K + unit - 1) / unit * unit : K;
}
constexpr int panels_of_tile(int rows) {
  int n = MR_MAX / rows;
  return n < 1 ? 1 : n > NP_MAX ? NP_MAX : n;
}

constexpr int PREFETCH = 2048;  // bytes ahead of the weights in use, over the panels of a tile

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define HAS_BF16_DOT 1
INLINE vf dot_pairs(vu x, vu w, vf sum) { return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w); }
#else
INLINE vf dot_pairs(vu, vu, vf sum) { return sum; }
#endif

template <class W, class A, int MR, int NP>
__attribute__((noinline, noclone)) void tile_kernel(int64_t K, const A* a, int64_t lda, const W* b, int64_t panel,
                                                    float* c, int64_t ldc, bool add) {
  vf acc[MR][NP * 2];
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
    for (int j = 0; j < NP * 2; j++) acc[r][j] = add ? load(c + r * ldc + j * VL) : vf{};

  // Rows in groups of three under one moving pointer, opaque to the compiler: it would keep a pointer a row and spill.
  constexpr int GROUPS = (MR + 2) / 3;
  const int64_t row = lda * sizeof(A);
  const char* group[GROUPS];
#pragma GCC unroll 4
  for (int g = 0; g < GROUPS; g++) group[g] = (const char*)(a + g * 3 * lda);

  // bf16 takes two k a turn, the halves of a word; PARTS are what is left of it for instructions of one k
  constexpr int STEP = std::is_same_v<W, bf16> ? 2 : 1;
  constexpr int PARTS = std::is_same_v<A, bf16> ? 1 : STEP;
  for (int64_t k = 0; k < K; k += STEP) {
    const W* at = b + k * NR;
#pragma GCC unroll 4
    for (int p = 0; p < NP; p++)
#pragma GCC unroll 4
      for (int byte = 0; byte < STEP * NR * (int)sizeof(W); byte += 64)
        __builtin_prefetch((const char*)(at + p * panel) + PREFETCH / NP + byte);
#pragma GCC unroll 2
    for (int i = 0; i < PARTS; i++) {
      vf w[NP * 2];
#pragma GCC unroll 8
      for (int j = 0; j < NP * 2; j++) {
        const W* column = at + (j / 2) * panel + (j % 2) * VL * STEP;
        if constexpr (PARTS == 2) {
          vu pair = load_bits<vu>(column);
          w[j] = i ? high_half<bf16>(pair) : low_half<bf16>(pair);
        } else if constexpr (STEP == 2) {
          w[j] = load_bits<vf>(column);
        } else {
          w[j] = load(column);
        }
      }
#pragma GCC unroll 16
      for (int r = 0; r < MR; r++) {
        vf x = splat(*(const float*)(group[r / 3] + r % 3 * row + i * 4));
#pragma GCC unroll 8
        for (int j = 0; j < NP * 2; j++)
          acc[r][j] = PARTS < STEP ? dot_pairs((vu)x, (vu)w[j], acc[r][j]) : fma(x, w[j], acc[r][j]);
      }
    }
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; g++) {
      group[g] += PARTS * 4;
      asm("" : "+r"(group[g]));
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
    for (int j = 0; j < NP * 2; j++) store(c + r * ldc + j * VL, acc[r][j]);
}

template <class W, class A = float> struct Kernels {
  void (*at[MR_MAX][NP_MAX])(int64_t, const A*, int64_t, const W*, int64_t, float*, int64_t, bool) = {};
  template <int R, int P> constexpr void fill() {
    at[R - 1][P - 1] = tile_kernel<W, A, R, P>;
    if constexpr (P > 1) fill<R, P - 1>();
    else if constexpr (R > 1) fill<R - 1, panels_of_tile(R - 1)>();
  }
};
template <class W, class A = float> const Kernels<W, A>& kernels();  // in kernels.cpp

// C[rows][panels * NR], overwritten or added to, for rows in 1..MR_MAX and panels in 1..panels_of_tile(rows); K is
// padded_k and `panel` the distance of two panels.
template <class W, class A>
INLINE void tile(int rows, int panels, int64_t K, const A* a, int64_t lda, const W* b, int64_t panel, float* c,
                 int64_t ldc, bool add) {
  kernels<W, A>().at[rows - 1][panels - 1](K, a, lda, b, panel, c, ldc, add);
}

// Splits `rows` into tiles of nearly equal height: fn(first row, rows).
template <class F> void for_tiles(int64_t rows, F&& fn) {
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
