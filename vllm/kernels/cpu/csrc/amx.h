// SPDX-License-Identifier: Apache-2.0
// bfloat16 products on the matrix unit (AMX) of processors that have one. Its operand layout is the panel of gemm.h.
//
// An element of C is a chain over rising k here as well, so a row's result is the same in any tile. Against the vector
// kernel it differs by rounding: a process uses one of the two for all its weights.
#pragma once

#include "gemm.h"

constexpr int AMX_ROWS = 32;  // two tiles high; a panel is two tiles wide

#if defined(__AVX512BW__) && defined(__linux__) && (defined(AMX_EMULATED) || defined(__AMX_BF16__))
#define HAS_AMX 1

struct TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // of a row
  uint8_t rows[16] = {};
};

#if defined(AMX_EMULATED)  // the same instructions in C++: tests run the kernel where there is no such unit

struct TileState {
  TileConfig config;
  uint8_t data[8][16][64];
};
inline thread_local TileState tiles_;
inline bool amx_allowed() { return true; }
inline void emulate_load(int t, const void* p, int64_t stride) {
  for (int r = 0; r < tiles_.config.rows[t]; r++)
    std::memcpy(tiles_.data[t][r], (const char*)p + r * stride, tiles_.config.bytes[t]);
}
inline void emulate_store(int t, void* p, int64_t stride) {
  for (int r = 0; r < tiles_.config.rows[t]; r++)
    std::memcpy((char*)p + r * stride, tiles_.data[t][r], tiles_.config.bytes[t]);
}
inline void emulate_dot(int c, int a, int b) {
  for (int m = 0; m < tiles_.config.rows[c]; m++)
    for (int n = 0; n < tiles_.config.bytes[c] / 4; n++)
      for (int k = 0; k < tiles_.config.bytes[a] / 2; k++)
        ((float*)tiles_.data[c][m])[n] +=
            to_float(((bf16*)tiles_.data[a][m])[k]) * to_float(((bf16*)tiles_.data[b][k / 2])[2 * n + k % 2]);
}
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(p) (std::memset((void*)&tiles_, 0xff, sizeof(tiles_)), (void)(tiles_.config = *(p)))
#define _tile_release() (void)std::memset((void*)&tiles_, 0, sizeof(tiles_))
#define _tile_zero(t) (void)std::memset(tiles_.data[t], 0, sizeof(tiles_.data[t]))
#define _tile_loadd(t, p, stride) emulate_load(t, p, stride)
#define _tile_stored(t, p, stride) emulate_store(t, p, stride)
#define _tile_dpbf16ps(c, a, b) emulate_dot(c, a, b)

#else

#include <sys/syscall.h>
#include <unistd.h>

// A process has to ask for the unit's registers once: ARCH_REQ_XCOMP_PERM for the tile data.
inline bool amx_allowed() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

#endif

constexpr int AMX_K = 32;  // of one instruction

// For the following products of `rows` (1..AMX_ROWS) rows. Tiles 0..3 hold C, 4 and 5 A, 6 and 7 B.
inline void amx_begin(int rows) {
  int upper = rows < 16 ? rows : 16, lower = rows > 16 ? rows - 16 : 16;
  TileConfig config;
  for (int t = 0; t < 8; t++) {
    config.bytes[t] = 64;
    config.rows[t] = (uint8_t)(t > 5 ? 16 : t == 0 || t == 1 || t == 4 ? upper : lower);
  }
  _tile_loadconfig(&config);
}
inline void amx_end() { _tile_release(); }

// C[rows][NR] = A[rows][K] times one panel; K is a multiple of AMX_K.
__attribute__((noinline)) inline void amx_tile(int rows, int64_t K, const bf16* a, int64_t lda, const bf16* b, float* c) {
  static_assert(NR == 32);
  asm volatile("" ::: "memory");  // the compiler's intrinsics do not say that they read memory
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < K; k += AMX_K) {
    const bf16* at = b + k * NR;
#pragma GCC unroll 32
    for (int i = 0; i < AMX_K * NR; i += 32) __builtin_prefetch((const char*)(at + i) + 2 * PREFETCH);
    _tile_loadd(6, at, NR * 4);
    _tile_loadd(7, at + 32, NR * 4);
    _tile_loadd(4, a + k, lda * 2);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (rows > 16) {
      _tile_loadd(5, a + 16 * lda + k, lda * 2);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, NR * 4);
  _tile_stored(1, c + 16, NR * 4);
  if (rows > 16) {
    _tile_stored(2, c + 16 * NR, NR * 4);
    _tile_stored(3, c + 16 * NR + 16, NR * 4);
  }
  asm volatile("" ::: "memory");
}

// Small integers have exact products: whether the unit does what this file expects of it.
inline bool amx_works() {
  constexpr int rows = 19, K = 64;
  static bf16 a[rows * K], b[K * NR];
  static float c[rows * NR];
  auto number = [](int i) { return (float)(i * 7 % 13 - 6); };
  auto narrow = [](float x) { return bf16{(uint16_t)(load_bits<uint32_t>(&x) >> 16)}; };
  for (int i = 0; i < rows * K; i++) a[i] = narrow(number(i));
  for (int i = 0; i < K * NR; i++) b[i] = narrow(number(i + 5));
  amx_begin(rows);
  amx_tile(rows, K, a, K, b, c);
  amx_end();
  for (int r = 0; r < rows; r++)
    for (int n = 0; n < NR; n++) {
      float want = 0;
      for (int k = 0; k < K; k++) want += number(r * K + k) * number((k / 2 * NR + n) * 2 + k % 2 + 5);
      if (c[r * NR + n] != want) return false;
    }
  return true;
}

#endif
