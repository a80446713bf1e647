// SPDX-License-Identifier: Apache-2.0
// Vector types of the build machine, the three storage types, and the thread loop.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <type_traits>
#include <utility>

#include "pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))
// An operator: from one record of 8-byte fields to 0, or to another number where what it points at does not fit together.
// All have this one type, so that a list of them can be run (run.cpp).
#define OPERATOR(name, Args)                                                          \
  static int64_t run_##name(const Args* a);                                           \
  EXPORT int64_t name(const void* record) { return run_##name((const Args*)record); } \
  static int64_t run_##name(const Args* a)
#define INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__) && defined(__AVX512BW__)
constexpr int VL = 16;          // floats in a register
constexpr int MR_MAX = 12;      // rows of a register tile: 2 * MR_MAX accumulators
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int VL = 8;
constexpr int MR_MAX = 6;
#else
constexpr int VL = 4;
constexpr int MR_MAX = 12;
#endif
constexpr int NR = 2 * VL;      // columns of a panel

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef uint16_t vh __attribute__((vector_size(VL * 2)));
typedef uint8_t vb __attribute__((vector_size(VL)));
#if defined(__aarch64__)
typedef __fp16 vhalf __attribute__((vector_size(VL * 2)));
#elif !defined(__AVX2__)
typedef _Float16 vhalf __attribute__((vector_size(VL * 2)));
#endif

constexpr float INF = std::numeric_limits<float>::infinity();

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };
struct e4m3 { uint8_t bits; };
enum Dtype { FP32 = 0, BF16 = 1, FP16 = 2 };

template <class V> INLINE V load_bits(const void* p) { V v; std::memcpy(&v, p, sizeof(V)); return v; }
template <class V> INLINE void store_bits(void* p, V v) { std::memcpy(p, &v, sizeof(V)); }

INLINE vf splat(float x) { return x - vf{}; }  // folds to a broadcast; x + 0 would not

INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__) && defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

// 16-bit words to 32 bits and back (the compiler's own conversion of vectors takes three times the instructions).
INLINE vu widen(vh x) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return (vu)_mm512_cvtepu16_epi32((__m256i)x);
#elif defined(__AVX2__) && defined(__FMA__)
  return (vu)_mm256_cvtepu16_epi32((__m128i)x);
#else
  return __builtin_convertvector(x, vu);
#endif
}
INLINE vh narrow(vu x) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return (vh)_mm512_cvtepi32_epi16((__m512i)x);
#else
  return __builtin_convertvector(x, vh);
#endif
}

INLINE vf load(const float* p) { return load_bits<vf>(p); }
INLINE vf load(const bf16* p) { return (vf)(widen(load_bits<vh>(p)) << 16); }
INLINE vf load(const fp16* p) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__) && defined(__F16C__)
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  return __builtin_convertvector(load_bits<vhalf>(p), vf);
#endif
}

INLINE void store(float* p, vf v) { store_bits(p, v); }
INLINE vu round_bf16(vf v) {  // the upper half of each word is v rounded to nearest even; a NaN stays one
  vu u = (vu)v;
  vu r = u + 0x7fffu + ((u >> 16) & 1u);
  return v == v ? r : u | 0x400000u;
}
INLINE void store(bf16* p, vf v) { store_bits(p, narrow(round_bf16(v) >> 16)); }
INLINE void store(fp16* p, vf v) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__AVX2__) && defined(__F16C__)
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  store_bits(p, __builtin_convertvector(v, vhalf));
#endif
}

// Nearest e4m3, the even one of two, at most 448 in size; a NaN stays one.
INLINE void store(e4m3* p, vf v) {
  vu u = (vu)v, size = u & 0x7fffffffu;
  size = (vf)size > splat(448.0f) ? (vu)splat(448.0f) : size;
  vu normal = ((size + 0x7ffffu + (size >> 20 & 1u)) >> 20) - (120u << 3);
  vu small = (vu)((vf)size + splat(16384.0f)) - (vu)splat(16384.0f);  // whole 2^-9, e4m3's least
  vu code = v != v ? vu{} + 0x7fu : (vf)size < splat(0.015625f) ? small : normal;
  store_bits(p, __builtin_convertvector(code | (u >> 24 & 0x80u), vb));
}

// The first n (< VL) elements; the rest of the register is 0 / memory stays untouched.
template <class T> INLINE vf load_part(const T* p, int n) {
  T tmp[VL] = {};
  std::memcpy(tmp, p, n * sizeof(T));
  return load(tmp);
}
template <class T> INLINE void store_part(T* p, vf v, int n) {
  T tmp[VL];
  store(tmp, v);
  std::memcpy(p, tmp, n * sizeof(T));
}

// fn(column, columns) over a row of n in registers, the last one in part.
template <class F> INLINE void for_columns(int64_t n, F&& fn) {
  int64_t d = 0;
  for (; d + VL <= n; d += VL) fn(d, VL);
  if (d < n) fn(d, (int)(n - d));
}
template <class T> INLINE vf get(const T* p, int n) { return n == VL ? load(p) : load_part(p, n); }
template <class T> INLINE void put(T* p, vf v, int n) {
  if (n == VL) store(p, v);
  else store_part(p, v, n);
}

template <class T> INLINE vf round_to(vf v) {
  if constexpr (std::is_same_v<T, float>) return v;
  if constexpr (std::is_same_v<T, bf16>) return (vf)(round_bf16(v) & 0xffff0000u);
  T tmp[VL];
  store(tmp, v);
  return load(tmp);
}

template <class T> INLINE float to_float(T x) { T tmp[VL] = {x}; return load(tmp)[0]; }
INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) { uint32_t u = (uint32_t)x.bits << 16; return load_bits<float>(&u); }

INLINE float sum(vf v) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return _mm512_reduce_add_ps(v);
#endif
  float s[VL];
  store(s, v);
  for (int w = VL / 2; w > 0; w /= 2)
    for (int i = 0; i < w; i++) s[i] += s[i + w];
  return s[0];
}
INLINE float max(vf v) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return _mm512_reduce_max_ps(v);
#endif
  float s[VL];
  store(s, v);
  for (int w = VL / 2; w > 0; w /= 2)
    for (int i = 0; i < w; i++) s[i] = s[i] > s[i + w] ? s[i] : s[i + w];
  return s[0];
}

INLINE vf at_least(vf low, vf x) {  // a NaN x stays
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return _mm512_max_ps(low, x);
#else
  return low > x ? low : x;
#endif
}

// exp(x) for x <= 88 by 2^n * p(r), r in [-ln2/2, ln2/2]: Taylor of degree 7, error about 1 ulp. Below -86 the result
// is 0. A NaN of any payload stays one, because p is one and 2^n a factor: adding n to p's exponent would make numbers of it.
INLINE vf exp(vf x) {
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  vf c = at_least(splat(-86.0f), x);
  vf shifted = fma(c, splat(1.44269504f), magic);
  vf n = shifted - magic;
  vf r = fma(n, splat(-0.693145752f), c);
  r = fma(n, splat(-1.42860677e-6f), r);
  vf p = fma(splat(1.0f / 5040), r, splat(1.0f / 720));
  p = fma(p, r, splat(1.0f / 120));
  p = fma(p, r, splat(1.0f / 24));
  p = fma(p, r, splat(1.0f / 6));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  vf power = (vf)(((vu)shifted << 23) + 0x3f800000u);  // the low bits of `shifted` are n
  return x < splat(-86.0f) ? vf{} : p * power;
}

INLINE vf times_sigmoid(vf x, vf u) {
  vf e = u < splat(-88.0f) ? splat(INF) : exp(-u);
  return x / (1.0f + e);
}
INLINE vf silu(vf x) { return times_sigmoid(x, x); }
// x (1 + tanh(u / 2)) / 2, u = sqrt(8 / pi) (x + 0.044715 x^3).
INLINE vf gelu_tanh(vf x) { return times_sigmoid(x, 1.59576912f * fma(0.044715f * x * x, x, x)); }

// The halves of 32-bit words as floats.
template <class T> INLINE vf low_half(vu words) {
  if constexpr (std::is_same_v<T, bf16>) return (vf)(words << 16);
  vh half = narrow(words);
  return load((const fp16*)&half);
}
template <class T> INLINE vf high_half(vu words) {
  if constexpr (std::is_same_v<T, bf16>) return (vf)(words & 0xffff0000u);
  return low_half<fp16>(words >> 16);
}

// Transposes a VL x VL matrix of 32-bit words held in registers: stage H exchanges bit H of row and column.
template <int H, int... I> INLINE void transpose_stage(vu* m, std::integer_sequence<int, I...>) {
  const vi low = {(I & H ? VL + I - H : I)...}, high = {(I & H ? VL + I : I + H)...};
#pragma GCC unroll 16
  for (int r = 0; r < VL; r++)
    if (!(r & H)) {
      vu a = m[r], b = m[r + H];
      m[r] = __builtin_shuffle(a, b, low);
      m[r + H] = __builtin_shuffle(a, b, high);
    }
}
INLINE void transpose(vu (&m)[VL]) {
  constexpr auto lanes = std::make_integer_sequence<int, VL>{};
  transpose_stage<1>(m, lanes);
  transpose_stage<2>(m, lanes);
  if constexpr (VL > 4) transpose_stage<4>(m, lanes);
  if constexpr (VL > 8) transpose_stage<8>(m, lanes);
}

// Runs fn() on up to n threads; see pool.h.
template <class F> void on_threads(int n, F&& fn) {
  run_on_threads(n, [](void* f) { (*(std::remove_reference_t<F>*)f)(); }, (void*)&fn);
}

// fn(task) over [0, n); threads take the next task when they are free.
template <class F> void for_tasks(int threads, int64_t n, F&& fn) {
  std::atomic<int64_t> next{0};
  on_threads((int)(n < threads ? n : threads), [&] {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) fn(i);
  });
}

// fn(begin, end) over [0, n) in contiguous pieces, a few for each thread; fewer than `grain` items are not worth one.
template <class F> void for_range(int threads, int64_t n, int64_t grain, F&& fn) {
  int64_t parts = (n + grain - 1) / grain, most = threads > 1 ? 4 * threads : 1;
  if (parts > most) parts = most;
  for_tasks(threads, parts, [&](int64_t i) { fn(n * i / parts, n * (i + 1) / parts); });
}

// Tests fill all scratch with this word, where it is not 0, each time before it is used.
inline uint32_t scratch_poison = 0;

// Scratch of one thread, kept between calls and grown when needed; 64-byte aligned, contents undefined.
struct Scratch {
  void* data = nullptr;
  size_t bytes = 0;
  ~Scratch() { std::free(data); }
  template <class T> T* get(size_t count) {
    size_t need = (count * sizeof(T) + 63) / 64 * 64;
    if (need > bytes) {
      std::free(data);
      data = std::aligned_alloc(64, need);
      if (!data) std::abort();
      bytes = need;
    }
    if (scratch_poison) std::fill_n((uint32_t*)data, bytes / 4, scratch_poison);
    return (T*)data;
  }
};

template <class F> void with_type(int64_t dtype, F&& fn) {
  if (dtype == BF16) fn(bf16{});
  else if (dtype == FP16) fn(fp16{});
  else fn(0.0f);
}
