// SPDX-License-Identifier: Apache-2.0
// The AVX-512 and VNNI instructions of the CPU kernels on a processor with AVX2, put before their source: with
// -include avx512.h -DEMULATED=512, 512 and VNNI (5120), 512 and pairs of bf16 (5121), or VNNI of 256 bits (256). Lanes are
// what AVX2's halves compute.
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#if EMULATED == 256
#define __AVXVNNI__ 1
#else
#define __AVX512F__ 1
#define __AVX512BW__ 1
#if EMULATED == 5120
#define __AVX512VNNI__ 1
#elif EMULATED == 5121
#define __AVX512BF16__ 1
#endif
#endif

namespace emulated {

template <class To, class From> inline To bits(const From& x) {
  static_assert(sizeof(To) == sizeof(From), "as many bytes");
  To to;
  std::memcpy(&to, &x, sizeof(to));
  return to;
}
template <class Half> struct Pair { Half low, high; };
template <class Half, class Whole> inline Pair<Half> halves(Whole x) { return bits<Pair<Half>>(x); }
template <class Whole, class Half> inline Whole whole(Half low, Half high) { return bits<Whole>(Pair<Half>{low, high}); }

template <class F> inline __m512i by_halves(__m512i a, F f) {
  auto x = halves<__m256i>(a);
  return whole<__m512i>(f(x.low), f(x.high));
}
template <class F> inline __m512i by_halves(__m512i a, __m512i b, F f) {
  auto x = halves<__m256i>(a), y = halves<__m256i>(b);
  return whole<__m512i>(f(x.low, y.low), f(x.high, y.high));
}
template <class F> inline __m512 floats_by_halves(__m512 a, __m512 b, F f) {
  auto x = halves<__m256>(a), y = halves<__m256>(b);
  return whole<__m512>(f(x.low, y.low), f(x.high, y.high));
}

template <class V> inline V dpbusd(V sum, V unsigned_bytes, V signed_bytes) {
  int32_t s[sizeof(V) / 4];
  uint8_t u[sizeof(V)];
  int8_t x[sizeof(V)];
  std::memcpy(s, &sum, sizeof(V));
  std::memcpy(u, &unsigned_bytes, sizeof(V));
  std::memcpy(x, &signed_bytes, sizeof(V));
  for (unsigned i = 0; i < sizeof(V); i++) s[i / 4] += u[i] * x[i];
  std::memcpy(&sum, s, sizeof(V));
  return sum;
}
inline float reduce(__m512 x, bool largest) {
  float s[16];
  std::memcpy(s, &x, sizeof(s));
  for (int w = 8; w > 0; w /= 2)
    for (int i = 0; i < w; i++) s[i] = largest ? (s[i] > s[i + w] ? s[i] : s[i + w]) : s[i] + s[i + w];
  return s[0];
}
inline __m512i widen_words(__m256i x) {
  return whole<__m512i>(_mm256_cvtepu16_epi32(halves<__m128i>(x).low), _mm256_cvtepu16_epi32(halves<__m128i>(x).high));
}
inline __m512i widen_bytes(__m256i x) {
  return whole<__m512i>(_mm256_cvtepu8_epi16(halves<__m128i>(x).low), _mm256_cvtepu8_epi16(halves<__m128i>(x).high));
}
inline __m512i widen_signed(__m128i x) {
  return whole<__m512i>(_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)));
}
inline __m256i narrow(__m512i x) {
  uint32_t from[16];
  uint16_t to[16];
  std::memcpy(from, &x, sizeof(from));
  for (int i = 0; i < 16; i++) to[i] = (uint16_t)from[i];
  return bits<__m256i>(to);
}
inline __m512 from_half(__m256i x) {
  return whole<__m512>(_mm256_cvtph_ps(halves<__m128i>(x).low), _mm256_cvtph_ps(halves<__m128i>(x).high));
}
inline __m256i to_half(__m512 x) {
  return whole<__m256i>(_mm256_cvtps_ph(halves<__m256>(x).low, 0), _mm256_cvtps_ph(halves<__m256>(x).high, 0));
}
inline __m512 fma(__m512 a, __m512 b, __m512 c) {
  auto x = halves<__m256>(a), y = halves<__m256>(b), z = halves<__m256>(c);
  return whole<__m512>(_mm256_fmadd_ps(x.low, y.low, z.low), _mm256_fmadd_ps(x.high, y.high, z.high));
}
inline __m512 dot_pairs(__m512 sum, __m512i a, __m512i b) {
  auto high = [](__m512i x) { return bits<__m512>(by_halves(x, [](__m256i h) { return _mm256_slli_epi32(_mm256_srli_epi32(h, 16), 16); })); };
  auto low = [](__m512i x) { return bits<__m512>(by_halves(x, [](__m256i h) { return _mm256_slli_epi32(h, 16); })); };
  return fma(low(a), low(b), fma(high(a), high(b), sum));
}
inline uint64_t signs(__m512i x) {
  auto h = halves<__m256i>(x);
  return (uint32_t)_mm256_movemask_epi8(h.low) | (uint64_t)(uint32_t)_mm256_movemask_epi8(h.high) << 32;
}
inline __m512i masked_difference(__m512i otherwise, uint64_t mask, __m512i a, __m512i b) {
  int8_t o[64], x[64], y[64];
  std::memcpy(o, &otherwise, 64);
  std::memcpy(x, &a, 64);
  std::memcpy(y, &b, 64);
  for (int i = 0; i < 64; i++)
    if (mask >> i & 1) o[i] = (int8_t)(x[i] - y[i]);
  return bits<__m512i>(o);
}

}  // namespace emulated

#define BY_HALVES_1(a, f) emulated::by_halves(a, [](__m256i x) { return f; })
#define BY_HALVES_2(a, b, f) emulated::by_halves(a, b, [](__m256i x, __m256i y) { return f; })

#undef _mm512_slli_epi16
#undef _mm512_cvtps_ph
#undef _mm512_extracti64x4_epi64
#define _mm512_fmadd_ps emulated::fma
#define _mm512_max_ps(a, b) emulated::floats_by_halves(a, b, [](__m256 x, __m256 y) { return _mm256_max_ps(x, y); })
#define _mm512_reduce_add_ps(a) emulated::reduce(a, false)
#define _mm512_reduce_max_ps(a) emulated::reduce(a, true)
#define _mm512_cvtepu16_epi32 emulated::widen_words
#define _mm512_cvtepu8_epi16 emulated::widen_bytes
#define _mm512_cvtepi8_epi32 emulated::widen_signed
#define _mm512_cvtepi32_epi16 emulated::narrow
#define _mm512_cvtph_ps emulated::from_half
#define _mm512_cvtps_ph(a, rounding) emulated::to_half(a)
#define _mm512_broadcast_i32x4(a) emulated::whole<__m512i>(_mm256_broadcastsi128_si256(a), _mm256_broadcastsi128_si256(a))
#define _mm512_shuffle_epi8(a, b) BY_HALVES_2(a, b, _mm256_shuffle_epi8(x, y))
#define _mm512_slli_epi16(a, n) BY_HALVES_1(a, _mm256_slli_epi16(x, n))
#define _mm512_add_epi16(a, b) BY_HALVES_2(a, b, _mm256_add_epi16(x, y))
#define _mm512_and_si512(a, b) BY_HALVES_2(a, b, _mm256_and_si256(x, y))
#define _mm512_maddubs_epi16(a, b) BY_HALVES_2(a, b, _mm256_maddubs_epi16(x, y))
#define _mm512_madd_epi16(a, b) BY_HALVES_2(a, b, _mm256_madd_epi16(x, y))
#define _mm512_abs_epi8(a) BY_HALVES_1(a, _mm256_abs_epi8(x))
#define _mm512_set1_epi16(n) emulated::whole<__m512i>(_mm256_set1_epi16(n), _mm256_set1_epi16(n))
#define _mm512_setzero_si512() emulated::whole<__m512i>(_mm256_setzero_si256(), _mm256_setzero_si256())
#define _mm512_castsi512_si256(a) emulated::halves<__m256i>(a).low
#define _mm512_extracti64x4_epi64(a, half) emulated::halves<__m256i>(a).high
#define _mm512_movepi8_mask emulated::signs
#define _mm512_mask_sub_epi8 emulated::masked_difference
#define _mm512_dpbf16_ps(sum, a, b) emulated::dot_pairs(sum, (__m512i)(a), (__m512i)(b))
#define _mm512_dpbusd_epi32 emulated::dpbusd<__m512i>
#define _mm256_dpbusd_avx_epi32 emulated::dpbusd<__m256i>
