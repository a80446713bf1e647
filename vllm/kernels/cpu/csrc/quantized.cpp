// SPDX-License-Identifier: Apache-2.0
// What quantized.h declares, the packing of weights, and embedding rows out of them.
#include "quantized.h"

namespace {

constexpr int ONE_SCALE = 64;  // columns of the inputs with one, where a weight's parts are smaller
constexpr int64_t AHEAD = 2048;  // bytes ahead of the codes in use, over the panels in use

// What a format has: SPAN, the steps that lie together in BYTES; STEPS, how many products of codes and int8 a half of
// a 32-bit lane can sum up, 0 for codes of 8 bits; OFFSET, the operand that stands for 0; UNIT, the value of 1; MINIMA
// and FACTORS as Quantized has them; operands(), the bytes to multiply of NR rows, of step s of a span.
struct Scaled {
  static constexpr int SPAN = 1, OFFSET = 0, FACTORS = 0;
  static constexpr bool MINIMA = false;
  static constexpr float UNIT = 1.0f;
};

template <int HIGH, int ZERO, bool MINIMUM = false, int PARTS = 0> struct Bits : Scaled {
  static constexpr int SPAN = HIGH ? 4 / HIGH : 1, BYTES = 2 * NR * (SPAN + (HIGH > 0)), STEPS = 8 >> HIGH;
  static constexpr int OFFSET = ZERO, FACTORS = PARTS;
  static constexpr bool MINIMA = MINIMUM;
  static INLINE void operands(const uint8_t* p, int s, vu (&w)[2]) {
    vu codes = load_bits<vu>(p + s * 2 * NR);
    w[0] = codes & 0x0f0f0f0fu;
    w[1] = codes >> 4 & 0x0f0f0f0fu;
    if constexpr (HIGH > 0) {
      vu high = load_bits<vu>(p + SPAN * 2 * NR);
#pragma GCC unroll 2
      for (int j = 0; j < 2; j++) {
        const int at = (2 * s + j) * HIGH;
        w[j] |= (at < 4 ? high << (4 - at) : high >> (at - 4)) & (HIGH == 1 ? 0x10101010u : 0x30303030u);
      }
    }
  }
};
struct Mxfp4 : Scaled {
  static constexpr int BYTES = 2 * NR, STEPS = 4, OFFSET = 12;
  static constexpr float UNIT = 0.5f;
  static INLINE vu operand(vu nibbles) {
    static const int8_t table[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};  // 12 + 2 * e2m1
#if defined(__AVX512F__) && defined(__AVX512BW__)
    return (vu)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)), (__m512i)nibbles);
#elif defined(__AVX2__) && defined(__FMA__)
    __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
    return (vu)_mm256_shuffle_epi8(twice, (__m256i)nibbles);
#else
    for (int i = 0; i < VL * 4; i++) ((uint8_t*)&nibbles)[i] = table[((uint8_t*)&nibbles)[i]];
    return nibbles;
#endif
  }
  static INLINE void operands(const uint8_t* p, int, vu (&w)[2]) {
    vu codes = load_bits<vu>(p);
    w[0] = operand(codes & 0x0f0f0f0fu);
    w[1] = operand(codes >> 4 & 0x0f0f0f0fu);
  }
};
struct Int8 : Scaled {
  static constexpr int BYTES = 4 * NR, STEPS = 0;
  static INLINE void operands(const uint8_t* p, int, vu (&w)[2]) {
    w[0] = load_bits<vu>(p);
    w[1] = load_bits<vu>(p + VL * 4);
  }
};
struct Fp8 : Scaled {  // a step is [4][NR] bytes
  static constexpr int BYTES = 4 * NR, STEPS = -1;
  // The exponents of e4m3 are float16's and 8 less, so the bits move into place and the unit makes up for that.
  static constexpr float UNIT = 256.0f;
  static INLINE void values(const uint8_t* p, const vf (&)[2], vf (&v)[4][2]) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++, p += NR) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
      __m512i h = _mm512_slli_epi16(_mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p)), 7);
      h = _mm512_add_epi16(h, _mm512_and_si512(h, _mm512_set1_epi16(0x4000)));  // the sign one place up
      v[i][0] = _mm512_cvtph_ps(_mm512_castsi512_si256(h));
      v[i][1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(h, 1));
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
      __m256i h = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
      h = _mm256_add_epi16(h, _mm256_and_si256(h, _mm256_set1_epi16(0x4000)));
      v[i][0] = _mm256_cvtph_ps(_mm256_castsi256_si128(h));
      v[i][1] = _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1));
#else
      typedef uint8_t vb __attribute__((vector_size(VL)));
      for (int j = 0; j < 2; j++) {
        vh h = __builtin_convertvector(load_bits<vb>(p + j * VL), vh) << 7;
        h += h & 0x4000;
        v[i][j] = load((const fp16*)&h);
      }
#endif
    }
  }
};

// A step of four columns as floats, less their zeros: to be multiplied by UNIT and scale.
template <class F> INLINE void values(const uint8_t* p, int s, const vf (&zero)[2], vf (&v)[4][2]) {
  if constexpr (F::STEPS < 0) {
    F::values(p, zero, v);
  } else {
    vu w[2];
    F::operands(p, s, w);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
#pragma GCC unroll 2
      for (int j = 0; j < 2; j++) {
        vi byte = F::STEPS ? (vi)(w[j] >> 8 * i & 255u) : (vi)(w[j] << (24 - 8 * i)) >> 24;
        v[i][j] = __builtin_convertvector(byte, vf) - zero[j];
      }
  }
}

template <class F> void with_format(int64_t format, F&& fn) {
  if (format == INT4) fn(Bits<0, 8>{});
  else if (format == INT8) fn(Int8{});
  else if (format == MXFP4) fn(Mxfp4{});
  else if (format == FP8) fn(Fp8{});
  else if (format == Q4_1) fn(Bits<0, 0, true>{});
  else if (format == Q5_0) fn(Bits<1, 16>{});
  else if (format == Q5_1) fn(Bits<1, 0, true>{});
  else if (format == Q4_K) fn(Bits<0, 0, true, 8>{});
  else if (format == Q5_K) fn(Bits<1, 0, true, 8>{});
  else fn(Bits<2, 32, false, 16>{});
}

INLINE vf load_scales(const Quantized& q, const uint8_t* record, int j) {
  if (q.scale_dtype == FP32) return load((const float*)record + j * VL);
  if (q.scale_dtype == BF16) return load((const bf16*)record + j * VL);
  return load((const fp16*)record + j * VL);
}
typedef int8_t vsb __attribute__((vector_size(VL)));
INLINE vi load_bytes(const uint8_t* p) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__) && defined(__FMA__)
  return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  return __builtin_convertvector(load_bits<vsb>(p), vi);
#endif
}
INLINE vf load_byte_floats(const uint8_t* p) { return __builtin_convertvector(load_bytes(p), vf); }
template <class F> INLINE vf load_zeros(const Quantized& q, const uint8_t* record, int j) {
  return q.zeros ? load_byte_floats(record + q.scale_bytes() + j * VL) : splat((float)F::OFFSET);
}
INLINE vf load_least(const Quantized& q, const uint8_t* record, int j) {
  return load((const fp16*)(record + q.scale_bytes()) + j * VL);
}
// The factors of a group's first part: NR for each part; the minima's stand after them.
template <class F> INLINE const uint8_t* factors_of(const Quantized& q, const uint8_t* record) {
  return record + q.scale_bytes() + (F::MINIMA ? 2 * NR : 0);
}

// The floats that decoding gives are to be multiplied by this: by 1 where groups have more than a scale.
template <class F> constexpr bool scaled_later() { return !F::MINIMA && !F::FACTORS; }
template <class F> INLINE vf scale_left(const Quantized& q, const uint8_t* record, int j) {
  return scaled_later<F>() ? load_scales(q, record, j) * splat(F::UNIT) : splat(1.0f);
}
// What decoding needs besides codes, of COLUMNS columns or all of a group.
template <class F> struct Line {
  static constexpr int COLUMNS = F::FACTORS ? 256 / F::FACTORS : 0;
  vf zero[2], scale[2], least[2];
  INLINE Line(const Quantized& q, const uint8_t* record, int64_t k) {
    for (int j = 0; j < 2; j++) {
      zero[j] = load_zeros<F>(q, record, j);
      least[j] = vf{};
      if constexpr (!scaled_later<F>()) {
        scale[j] = load_scales(q, record, j);
        if constexpr (F::MINIMA) least[j] = load_least(q, record, j);
        if constexpr (F::FACTORS > 0) {
          const uint8_t* at = factors_of<F>(q, record) + k / COLUMNS * NR + j * VL;
          scale[j] *= load_byte_floats(at);
          if constexpr (F::MINIMA) least[j] *= load_byte_floats(at + F::FACTORS * NR);
        }
      }
    }
  }
  INLINE void values(const uint8_t* p, int s, vf (&v)[4][2]) const {
    ::values<F>(p, s, zero, v);
    if constexpr (!scaled_later<F>())
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++) v[i / 2][i % 2] = fma(v[i / 2][i % 2], scale[i % 2], -least[i % 2]);
  }
};

// Columns [k0, k1) of one group of a panel as floats [k1 - k0][NR], times scale_left().
template <class F> void decode_group(const Quantized& q, const uint8_t* panel, int64_t k0, int64_t k1, float* out) {
  const uint8_t* record = panel + k0 / q.group * q.record();
  const int64_t first = k0 % q.group;
  const uint8_t* codes = record + q.head_bytes() + first / (4 * F::SPAN) * F::BYTES;
  const int64_t columns = F::FACTORS ? Line<F>::COLUMNS : k1 - k0;
  for (int64_t k = k0; k < k1;) {
    const Line<F> line(q, record, first + k - k0);
    for (const int64_t end = k + columns; k < end; k += 4 * F::SPAN, codes += F::BYTES)
#pragma GCC unroll 4
      for (int s = 0; s < F::SPAN; s++, out += 4 * NR) {
        vf v[4][2];
        line.values(codes, s, v);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) store(out + i * VL, v[i / 2][i % 2]);
      }
  }
}

// C[PANELS * NR] = one row of floats times panels: what tile() makes of what decode_group() gives, without the detour.
template <class F, int PANELS>
__attribute__((noinline)) void wide_row(const Quantized& q, const uint8_t* panel, const float* x, float* c) {
  const int64_t distance = q.panel(), record = q.record(), head = q.head_bytes();
  const int64_t columns = F::FACTORS ? Line<F>::COLUMNS : q.group;
  for (int64_t k = 0; k < q.K; k += q.group, panel += record) {
    vf part[PANELS][2] = {};
    const int64_t n = q.K - k < q.group ? q.K - k : q.group;
    const uint8_t* codes = panel + head;
    for (int64_t i = 0; i < n;) {
      const Line<F> first(q, panel, i), last(q, panel + (PANELS - 1) * distance, i);
      for (const int64_t end = i + columns < n ? i + columns : n; i < end; i += 4 * F::SPAN, codes += F::BYTES)
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 4
          for (int step = 0; step < F::SPAN; step++) {
            vf v[4][2];
            (p ? last : first).values(codes + p * distance, step, v);
            const int64_t at = i + 4 * step, left = n - at;
#pragma GCC unroll 4
            for (int s = 0; s < 4; s++)
              if (s < left)
                for (int j = 0; j < 2; j++) part[p][j] = fma(splat(x[k + at + s]), v[s][j], part[p][j]);
          }
    }
    for (int p = 0; p < PANELS; p++)
      for (int j = 0; j < 2; j++) {
        float* to = c + p * NR + j * VL;
        store(to, fma(part[p][j], scale_left<F>(q, panel + p * distance, j), k ? load(to) : vf{}));
      }
  }
}

// Sums of four products in each 32-bit lane: unsigned codes below 64 times int8, added in 16-bit halves where the
// machine has no instruction for it; sum_halves() then makes 32-bit sums of them.
#if (defined(__AVX512VNNI__) && defined(__AVX512BW__)) || (defined(__AVXVNNI__) && !defined(__AVX512BW__))
INLINE vi dot_unsigned(vi sum, vu w, vi x) {
#if defined(__AVX512BW__)
  return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#else
  return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
#endif
}
INLINE vi sum_halves(vi sum) { return sum; }
INLINE vi dot_signed(vi sum, vu w, vi x) { return dot_unsigned(sum, w ^ 0x80808080u, x); }
constexpr int SIGNED_OFFSET = 128;
#elif defined(__AVX512F__) && defined(__AVX512BW__)
INLINE vi dot_unsigned(vi sum, vu w, vi x) {
  return (vi)_mm512_add_epi16((__m512i)sum, _mm512_maddubs_epi16((__m512i)w, (__m512i)x));
}
INLINE vi sum_halves(vi sum) { return (vi)_mm512_madd_epi16((__m512i)sum, _mm512_set1_epi16(1)); }
INLINE vi dot_signed(vi sum, vu w, vi x) {
  __m512i same = _mm512_mask_sub_epi8((__m512i)x, _mm512_movepi8_mask((__m512i)w), _mm512_setzero_si512(), (__m512i)x);
  return sum + sum_halves((vi)_mm512_maddubs_epi16(_mm512_abs_epi8((__m512i)w), same));
}
constexpr int SIGNED_OFFSET = 0;
#elif defined(__AVX2__) && defined(__FMA__)
INLINE vi dot_unsigned(vi sum, vu w, vi x) {
  return (vi)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)w, (__m256i)x));
}
INLINE vi sum_halves(vi sum) { return (vi)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1)); }
INLINE vi dot_signed(vi sum, vu w, vi x) {  // -128 is 128 as unsigned, and x is never -128
  __m256i same = _mm256_sign_epi8((__m256i)x, (__m256i)w);
  return sum + sum_halves((vi)_mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)w), same));
}
constexpr int SIGNED_OFFSET = 0;
#else
INLINE vi dot_unsigned(vi sum, vu w, vi x) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) sum += (vi)(w >> 8 * i & 255u) * ((vi)((vu)x << (24 - 8 * i)) >> 24);
  return sum;
}
INLINE vi sum_halves(vi sum) { return sum; }
INLINE vi dot_signed(vi sum, vu w, vi x) { return dot_unsigned(sum, w ^ 0x80808080u, x); }
constexpr int SIGNED_OFFSET = 128;
#endif

#if (defined(__AVX512BW__) && !defined(__AVX512VNNI__)) || \
    (defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512BW__) && !defined(__AVXVNNI__))
constexpr bool IN_HALVES = true;
#else
constexpr bool IN_HALVES = false;
#endif
// sum_halves() of sums, each times its lane's factor.
INLINE vi load_factor(const uint8_t* p) {
  vi factor = load_bytes(p);
  if (!IN_HALVES) return factor;
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512BW__)
  return (vi)_mm256_blend_epi16((__m256i)factor, _mm256_slli_epi32((__m256i)factor, 16), 0xaa);
#else
  return (factor & 0xffff) | factor << 16;
#endif
}
INLINE vi sum_times(vi sum, vi factor) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  if (IN_HALVES) return (vi)_mm512_madd_epi16((__m512i)sum, (__m512i)factor);
#elif defined(__AVX2__) && defined(__FMA__)
  if (IN_HALVES) return (vi)_mm256_madd_epi16((__m256i)sum, (__m256i)factor);
#endif
  return sum * factor;
}

// What the sums of operands hold too much for each unit of the inputs' sum, where there are no zeros.
template <class F> constexpr int offset_of(bool zeros) { return F::STEPS ? (zeros ? 0 : F::OFFSET) : SIGNED_OFFSET; }

template <class F, int ROWS, int PANELS>
__attribute__((noinline)) void dot_columns(const Quantized& q, const uint8_t* panel, const char* x, int64_t ldx,
                                           float* c) {
  const int64_t blocks = q.blocks(), groups = q.groups(), of_group = q.group / q.block, head = q.head_bytes();
  const int64_t distance = q.panel();
  const bool zeros = q.zeros;
  // Four steps at a time; MOST: as often until a half may be full. PARTS: blocks of one scale of the inputs, where each
  // has a factor. What these sums start from is in halves too, so that they end within one: 8 times 127 times 32.
  constexpr int MOST = F::FACTORS && F::OFFSET ? 1 : F::STEPS ? F::STEPS / 4 : 1 << 30;
  constexpr int COLUMNS = 2 * PANELS, PARTS = F::FACTORS ? F::FACTORS * ONE_SCALE / 256 : 1;
  vf acc[ROWS][COLUMNS] = {};
  const uint8_t* w = panel;
  int64_t b = 0;
  for (int64_t g = 0; g < groups; g++) {
    const uint8_t *record = w, *factors = factors_of<F>(q, record);
    vf unit[COLUMNS], least[ROWS][COLUMNS] = {};
    for (int j = 0; j < COLUMNS; j++)
      unit[j] = load_scales(q, record + j / 2 * distance, j % 2) * splat(F::UNIT);
    w += head;
    for (int64_t i = 0; i < of_group; i += PARTS) {
      vi total[ROWS][COLUMNS] = {};
      const int8_t* codes[ROWS];
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        IntegerRow row(x + r * ldx, blocks);
        codes[r] = row.codes + b * q.block;
        if constexpr (!F::FACTORS)
          for (int j = 0; j < COLUMNS; j++) total[r][j] = row.start[b] - vi{};
      }
      for (int part = 0; part < PARTS; part++, b++) {
        for (int left = (int)(q.block / 16); left > 0; left -= MOST) {
          vi sums[ROWS][COLUMNS] = {};
          if constexpr (F::FACTORS && F::OFFSET)
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++)
              for (int j = 0; j < COLUMNS; j++) sums[r][j] = IntegerRow(x + r * ldx, blocks).start[b] - vi{};
          for (int n = left < MOST ? left : MOST; n > 0; n--) {
#pragma GCC unroll 4
            for (int s = 0; s < 4; s++) {
              vi four[ROWS];
#pragma GCC unroll 8
              for (int r = 0; r < ROWS; r++) {
                four[r] = load_bits<int32_t>(codes[r]) - vi{};
                codes[r] += 4;
              }
#pragma GCC unroll 4
              for (int p = 0; p < PANELS; p++) {
                vu operand[2];
                if (s % F::SPAN == 0)
#pragma GCC unroll 8
                  for (int line = 0; line < F::BYTES; line += 64)
                    __builtin_prefetch(w + p * distance + AHEAD / PANELS + line);
                F::operands(w + p * distance, s % F::SPAN, operand);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
                  for (int j = 0; j < 2; j++)
                    if constexpr (F::STEPS) sums[r][2 * p + j] = dot_unsigned(sums[r][2 * p + j], operand[j], four[r]);
                    else total[r][2 * p + j] = dot_signed(total[r][2 * p + j], operand[j], four[r]);
              }
              if (s % F::SPAN == F::SPAN - 1) w += F::BYTES;
            }
          }
          for (int j = 0; j < COLUMNS && F::STEPS; j++) {
            vi factor = F::FACTORS ? load_factor(factors + j / 2 * distance + j % 2 * VL) : vi{};
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++)
              total[r][j] += F::FACTORS ? sum_times(sums[r][j], factor) : sum_halves(sums[r][j]);
          }
        }
        if constexpr (F::FACTORS && F::MINIMA)
          for (int j = 0; j < COLUMNS; j++) {
            vf factor = load_byte_floats(factors + F::FACTORS * NR + j / 2 * distance + j % 2 * VL);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++)
              least[r][j] = fma(factor, splat(IntegerRow(x + r * ldx, blocks).minus_sum[b]), least[r][j]);
          }
        factors += NR;
      }
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        IntegerRow row(x + r * ldx, blocks);
        for (int j = 0; j < COLUMNS; j++) {
          vf sum = __builtin_convertvector(total[r][j], vf) * splat(row.scale[b - 1]);
          if (zeros) sum = fma(load_zeros<F>(q, record + j / 2 * distance, j % 2), splat(row.minus_sum[b - 1]), sum);
          acc[r][j] = fma(sum, unit[j], acc[r][j]);
          if constexpr (F::MINIMA && !F::FACTORS) least[r][j] += splat(row.minus_sum[b - 1]);
        }
      }
    }
    if constexpr (F::MINIMA)
      for (int j = 0; j < COLUMNS; j++) {
        vf from = load_least(q, record + j / 2 * distance, j % 2);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) acc[r][j] = fma(least[r][j], from, acc[r][j]);
      }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
    for (int j = 0; j < COLUMNS; j++) store(c + r * PANELS * NR + j * VL, acc[r][j]);
}

template <class F, int ROWS = DOT_ROWS, int PANELS = 1>
void dot_shape(const Quantized& q, int rows, int panels, const uint8_t* panel, const char* x, int64_t ldx, float* c) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return dot_shape<F, ROWS - 1, 1>(q, rows, panels, panel, x, ldx, c);
  if constexpr (PANELS < dot_panels(ROWS, F::BYTES))
    if (panels > PANELS) return dot_shape<F, ROWS, PANELS + 1>(q, rows, panels, panel, x, ldx, c);
  dot_columns<F, ROWS, PANELS>(q, panel, x, ldx, c);
}

// The largest magnitude of n floats; NaN where one of them is not finite.
INLINE float magnitude(const float* x, int64_t n) {
  vi most = {};
  for (int64_t k = 0; k < n; k += VL) {
    vi bits = (vi)(load_bits<vu>(x + k) & 0x7fffffffu);
    most = most > bits ? most : bits;
  }
  float result = max((vf)most);  // infinity is the largest number; the bits of a NaN are larger still
  for (int i = 0; i < VL; i++)
    if (most[i] >= 0x7f800000) result = std::numeric_limits<float>::quiet_NaN();
  return result;
}

// A plain matrix: codes of a row `row` bytes after those of the row before; scales and zeros [N][groups], contiguous.
// With `fp8_group` fp8 codes, whose scales are of that many columns, become int8 with scales of q's groups.
struct PackArgs {
  Quantized q;
  const uint8_t* codes;  // or blocks, of `block_bytes`
  int64_t row;
  const void* scales;
  const int8_t* zeros;
  uint8_t* out;
  int64_t fp8_group, fp8_scale_dtype, block_bytes, threads;
};

float scale_at(const void* scales, int64_t dtype, int64_t i) {
  float scale = 0;
  with_type(dtype, [&](auto t) { scale = to_float(((const decltype(t)*)scales)[i]); });
  return scale;
}

// `n` values of e4m3, times their scales, as int8 with one scale, a bfloat16: NaN where one of them is not finite.
void fp8_to_int8(const PackArgs& a, const uint8_t* codes, int64_t n, int64_t k0, int64_t first_scale, int8_t* out,
                 bf16* to) {
  float value[32] = {}, most = 0;
  for (int64_t i = 0; i < n; i++) {
    int c = codes[i], exponent = c >> 3 & 15, mantissa = exponent ? (c & 7) | 8 : c & 7;
    float size = (c & 127) == 127 ? NAN : std::ldexp((float)mantissa, (exponent ? exponent : 1) - 10);
    value[i] = (c & 128 ? -size : size) * scale_at(a.scales, a.fp8_scale_dtype, first_scale + (k0 + i) / a.fp8_group);
    most = std::fabs(value[i]) <= most ? most : std::fabs(value[i]) < INF ? std::fabs(value[i]) : NAN;
    if (most != most) break;
  }
  float scale = most / 127.0f * 1.0078125f;  // no less than that after its rounding
  uint32_t bits = load_bits<uint32_t>(&scale);
  *to = bf16{(uint16_t)(bits >> 16)};
  if (most != most) to->bits = 0xffff;
  scale = to_float(*to);
  for (int64_t i = 0; i < n; i++) out[i] = scale > 1.2e-38f ? (int8_t)std::nearbyint(value[i] / scale) : 0;
}

// One of GGUF's blocks, taken apart.
struct Block {
  uint16_t scale, least;  // float16; what to subtract
  int8_t factors[16], minima[16];
  uint8_t codes[256];
};
uint16_t load_half(const uint8_t* p) { return load_bits<uint16_t>(p); }
void read_block(int64_t format, const uint8_t* p, Block& b) {
  if (format == Q6_K) {
    b.scale = load_half(p + 208);
    std::memcpy(b.factors, p + 192, 16);
    for (int k = 0; k < 256; k++) {
      const int half = k / 128, at = k % 128;
      const int low = p[half * 64 + at % 64] >> at / 64 * 4 & 15, high = p[128 + half * 32 + at % 32] >> at / 32 * 2 & 3;
      b.codes[k] = (uint8_t)(low | high << 4);
    }
  } else if (format == Q4_K || format == Q5_K) {
    b.scale = load_half(p), b.least = load_half(p + 2);
    const uint8_t *s = p + 4, *low = p + (format == Q5_K ? 48 : 16);
    for (int i = 0; i < 4; i++) {
      b.factors[i] = s[i] & 63, b.factors[i + 4] = (s[i + 8] & 15) | s[i] >> 6 << 4;
      b.minima[i] = s[i + 4] & 63, b.minima[i + 4] = s[i + 8] >> 4 | s[i + 4] >> 6 << 4;
    }
    for (int k = 0; k < 256; k++) {
      b.codes[k] = low[k / 64 * 32 + k % 32] >> k / 32 % 2 * 4 & 15;
      if (format == Q5_K) b.codes[k] |= (p[16 + k % 32] >> k / 32 & 1) << 4;
    }
  } else {
    b.scale = load_half(p);
    if (format != Q5_0) b.least = load_half(p + 2) ^ 0x8000;  // here it is added
    const uint8_t* low = p + (format == Q5_0 ? 2 : 4) + (format == Q4_1 ? 0 : 4);
    for (int k = 0; k < 32; k++) {
      b.codes[k] = low[k % 16] >> k / 16 * 4 & 15;
      if (format != Q4_1) b.codes[k] |= (low[k / 8 - 4] >> k % 8 & 1) << 4;
    }
  }
}

// As pack_panel.
template <class F> void pack_blocks(const PackArgs& a, int64_t n0, uint8_t* out) {
  const Quantized& q = a.q;
  const int64_t groups = q.groups(), bytes = a.block_bytes;
  Block b;
  std::memset(out, 0, q.panel());
  for (int64_t j = 0; j < NR && n0 + j < q.N; j++)
    for (int64_t g = 0; g < groups; g++) {
      read_block(q.format, a.codes + (n0 + j) * a.row + g * bytes, b);
      uint8_t *record = out + g * q.record(), *at = record + q.scale_bytes(), *codes = record + q.head_bytes();
      std::memcpy(record + j * 2, &b.scale, 2);
      if (F::MINIMA) std::memcpy(at + j * 2, &b.least, 2), at += 2 * NR;
      for (int i = 0; i < F::FACTORS; i++) {
        at[i * NR + j] = (uint8_t)b.factors[i];
        if (F::MINIMA) at[(F::FACTORS + i) * NR + j] = (uint8_t)b.minima[i];
      }
      for (int64_t k = 0; k < q.group; k++) {
        uint8_t* span = codes + k / (4 * F::SPAN) * F::BYTES + j % VL * 4 + k % 4;
        const int s = (int)(k / 4 % F::SPAN), half = (int)(j / VL);
        span[s * 2 * NR] |= (b.codes[k] & 15) << 4 * half;
        if (F::SPAN > 1) span[F::SPAN * 2 * NR] |= b.codes[k] >> 4 << (2 * s + half) * (4 / F::SPAN);
      }
    }
}

// One panel, whose first row of the weight is n0. Rows past N get scale 0.
void pack_panel(const PackArgs& a, int64_t n0, uint8_t* out) {
  const Quantized& q = a.q;
  const int64_t size = q.scale_bytes() / NR, groups = q.groups();
  int8_t rounded[32];
  std::memset(out, 0, q.panel());
  for (int64_t j = 0; j < NR && n0 + j < q.N; j++) {
    const uint8_t* row = a.codes + (n0 + j) * a.row;
    for (int64_t g = 0; g < groups; g++) {
      uint8_t *record = out + g * q.record(), *scale = record + j * size, *step = record + q.head_bytes();
      const uint8_t* codes = row;
      const int64_t begin = g * q.group, end = begin + q.group < q.K ? begin + q.group : q.K;
      if (a.fp8_group) {
        int64_t first = (n0 + j) * ((q.K + a.fp8_group - 1) / a.fp8_group);
        fp8_to_int8(a, row + begin, end - begin, begin, first, rounded, (bf16*)scale);
        codes = (const uint8_t*)rounded - begin;
      } else {
        std::memcpy(scale, (const char*)a.scales + ((n0 + j) * groups + g) * size, size);
      }
      if (q.zeros) record[q.scale_bytes() + j] = (uint8_t)a.zeros[(n0 + j) * groups + g];
      bool nan = false;
      for (int64_t k = begin; k < end; k++) {
        int64_t i = k % 4;
        if (q.step_bytes() == 2 * NR) step[j % VL * 4 + i] |= (codes[k / 2] >> 4 * (k % 2) & 15) << 4 * (j / VL);
        else if (q.format == INT8) step[j * 4 + i] = codes[k];
        else step[i * NR + j] = codes[k], nan |= (codes[k] & 0x7f) == 0x7f;
        if (i == 3) step += q.step_bytes();
      }
      if (nan) std::memset(scale, 0xff, size);  // the bits do not say so for themselves once they have moved
    }
  }
}

// One row of the weight as it is, in float32 with one rounding for zero and scale each.
template <class F, class T> void unpack_row(const Quantized& q, int64_t n, T* out) {
  constexpr int64_t COLUMNS = 64;
  float wide[COLUMNS * NR];
  const uint8_t* panel = q.data + n / NR * q.panel();
  const int j = (int)(n % NR);
  for (int64_t k = 0; k < q.K;) {
    int64_t end = std::min({k + COLUMNS, k / q.group * q.group + q.group, q.K});
    decode_group<F>(q, panel, k, k + (end - k + 3) / 4 * 4, wide);
    float scale = scale_left<F>(q, panel + k / q.group * q.record(), j / VL)[j % VL];
    for (const float* v = wide + j; k < end; k++, v += NR)
      store_part(out + (q.order ? q.order[k] : k), splat(*v * scale), 1);
  }
}

}  // namespace

void dot_tile(const Quantized& q, int rows, int panels, const uint8_t* panel, const char* x, int64_t ldx, float* c) {
  with_format(q.format, [&](auto f) {
    if constexpr (decltype(f)::STEPS >= 0) dot_shape<decltype(f)>(q, rows, panels, panel, x, ldx, c);
  });
}

void wide_tiles(const Quantized& q, int rows, int panels, const uint8_t* panel, const float* x, int64_t ldx, float* c) {
  constexpr int64_t COLUMNS = 64;  // decoded at a time, so that they, the inputs and sums share the L1 cache
  static thread_local Scratch decoded_scratch, part_scratch;
  const int64_t ldc = panels * NR;
  with_format(q.format, [&](auto f) {
    using F = decltype(f);
    if (rows == 1) {
      for (int p = 0; p < panels; p += 2) {
        const uint8_t* at = panel + p * q.panel();
        if (panels - p > 1) wide_row<F, 2>(q, at, x, c + p * NR);
        else wide_row<F, 1>(q, at, x, c + p * NR);
      }
      return;
    }
    float* w = decoded_scratch.get<float>(COLUMNS * ldc);
    float* part = part_scratch.get<float>(rows * ldc);
    for (int64_t g = 0; g < q.groups(); g++) {
      const int64_t begin = g * q.group, end = begin + q.group < q.K ? begin + q.group : q.K;
      for (int64_t k = begin; k < end; k += COLUMNS) {
        int64_t n = end - k < COLUMNS ? end - k : COLUMNS;
        for (int p = 0; p < panels; p++)
          decode_group<F>(q, panel + p * q.panel(), k, k + (n + 3) / 4 * 4, w + p * COLUMNS * NR);
        for_tiles(rows, [&](int64_t r0, int mr) {
          for (int p = 0, np; p < panels; p += np) {
            np = panels - p < panels_of_tile(mr) ? panels - p : panels_of_tile(mr);
            tile(mr, np, n, x + r0 * ldx + k, ldx, w + p * COLUMNS * NR, COLUMNS * NR, part + r0 * ldc + p * NR, ldc,
                 k > begin);
          }
        });
      }
      for (int64_t j = 0; j < ldc; j += VL) {
        vf scale = scale_left<F>(q, panel + j / NR * q.panel() + g * q.record(), j % NR / VL);
        for (int64_t r = 0; r < rows; r++) {
          float* to = c + r * ldc + j;
          store(to, fma(load(part + r * ldc + j), scale, g ? load(to) : vf{}));
        }
      }
    }
  });
}

// A block that is not finite has the scale NaN and codes 0.
void round_to_int8(const Quantized& q, const float* x, char* out) {
  int offset = 0;
  with_format(q.format, [&](auto f) { offset = offset_of<decltype(f)>(q.zeros); });
  const bool halves = IN_HALVES && q.factors();
  const int64_t same = q.factors() ? ONE_SCALE / q.block : 1;  // blocks
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, ties to even
  IntegerRow row(out, q.blocks());
  const bool whole = q.activations == TO_INT8;
  const float most = whole ? magnitude(x, q.padded()) : 0;
  float largest = 0;
  for (int64_t b = 0; b < q.blocks(); b++) {
    const float* from = x + b * q.block;
    int8_t* to = (int8_t*)row.codes + b * q.block;
    if (b % same == 0) largest = whole ? (most < 1e-12f ? 1e-12f : most) : magnitude(from, same * q.block);
    float scale = largest / 127.0f, inverse = largest > 1e-36f ? 127.0f / largest : 0.0f;
    vi total = {};
    if (largest != largest) std::memset(to, 0, q.block);
    else
      for (int64_t k = 0; k < q.block; k += VL) {
        vf v = load(from + k);
        vi n = (vi)((whole ? v / splat(scale) : v * splat(inverse)) + magic) - (vi)magic;
        store_bits(to + k, __builtin_convertvector(n, vsb));
        total += n;
      }
    int32_t sum = 0;
    for (int i = 0; i < VL; i++) sum += total[i];
    ((float*)row.scale)[b] = scale;
    ((float*)row.minus_sum)[b] = -scale * (float)sum;
    ((int32_t*)row.start)[b] = -offset * sum;
    if (halves) {
      int32_t half[2] = {};
      for (int64_t k = 0; k < q.block; k++) half[k / 2 % 2] += to[k];
      ((int32_t*)row.start)[b] = (-offset * half[0] & 0xffff) | -offset * half[1] * 65536;
    }
  }
}

void round_row(const Quantized& q, float* x) {
  const int64_t to = q.activations, K = q.padded();
  const vf magic = splat(12582912.0f), tiny = splat(24576.0f);  // 1.5 * 2^14: adding it rounds to 2^-9, e4m3's least
  float most = magnitude(x, K);
  vf scale = splat((most < 1e-12f ? 1e-12f : most) / (to == TO_INT8 ? 127.0f : 448.0f));
  for (int64_t k = 0; k < K; k += VL) {
    vf v = load(x + k) / scale, n;
    if (to == TO_INT8) {
      n = (v + magic) - magic;
    } else {
      vu u = (vu)v;
      vf normal = (vf)((u + 0x7ffffu + (u >> 20 & 1u)) & 0xfff00000u), size = (vf)(u & 0x7fffffffu);
      n = size < splat(0.015625f) ? (v + tiny) - tiny : v == v ? normal : v;
    }
    store(x + k, n * scale);
  }
}

OPERATOR(vc_quantized_panel, Quantized) { return a->panel(); }

OPERATOR(vc_pack_quantized, PackArgs) {
  for_range((int)a->threads, (a->q.N + NR - 1) / NR, 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; p++) {
      uint8_t* out = a->out + p * a->q.panel();
      if (!a->block_bytes) pack_panel(*a, p * NR, out);
      else with_format(a->q.format, [&](auto f) { pack_blocks<decltype(f)>(*a, p * NR, out); });
    }
  });
  return 0;
}

struct QuantizedEmbeddingArgs {  // as EmbeddingArgs
  int64_t dtype, T, N;
  const int64_t* ids;
  const Quantized* w;
  void* out;
  int64_t threads, first, shared;
};
OPERATOR(vc_quantized_embedding, QuantizedEmbeddingArgs) {
  const Quantized& q = *a->w;
  for (int64_t i = 0; i < a->T && !a->shared; i++)
    if (a->ids[i] < 0 || a->ids[i] >= a->N) return 1;
  with_type(a->dtype, [&](auto t) {
    for_range((int)a->threads, a->T, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        int64_t row = a->ids[i] - a->first;
        auto* out = (decltype(t)*)a->out + i * q.K;
        if (row < 0 || row >= a->N) std::memset(out, 0, q.K * sizeof(*out));
        else with_format(q.format, [&](auto f) { unpack_row<decltype(f)>(q, row, out); });
      }
    });
  });
  return 0;
}
