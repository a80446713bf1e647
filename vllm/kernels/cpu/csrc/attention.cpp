// SPDX-License-Identifier: Apache-2.0
// Causal grouped-query attention over the paged cache; prefill and decode are one algorithm.
//
// The keys of a request are cut at absolute positions into blocks of KB and splits of SPLIT. A row (query, head) runs an
// online softmax over the blocks of a split, and the splits are merged in rising order. The cuts depend on nothing but
// the position, and the tile kernel gives a row the same value in any tile: so a row's result is bitwise the same alone
// or in a batch, for any chunking of the prompt and any number of threads.
//
// A key outside a row's range never enters its sums, not even with weight 0: unwritten slots may hold NaN.
#include <algorithm>
#include <vector>

#include "gemm.h"

namespace {

constexpr int KB = 64;
constexpr int SPLIT = 512;
constexpr int ROWS = 8 * MR_MAX;  // rows of a task, where the head group allows
static_assert(KB % NR == 0 && SPLIT % KB == 0);

struct Args {
  int64_t dtype;
  const void* q;
  int64_t q0, q1;
  const void* k_cache;
  int64_t kc0, kc1, kc2;
  const void* v_cache;
  int64_t vc0, vc1, vc2;
  const int32_t* table;
  int64_t table0;
  const int32_t *start, *lens;
  int64_t requests, tokens, heads, kv_heads, D, DV, blocks, block_size, table_blocks, window;
  void* out;
  int64_t out0, out1;
  const float* sinks;  // a head's logit of a column without a value, or null
  int64_t threads;
  int64_t codes;  // the caches are e4m3
  double scale, cap, v_scale;  // what the scores and the sums are multiplied by
};

// Some queries of a request with some of its KV heads. Rows: KV head, query, head of the group.
struct Task {
  int64_t request, kv_head, kv_heads;
  int64_t first_query, queries;  // within the request
  int64_t per_head, rows;        // rows of a KV head, of all
  int64_t first_split, splits;
  int64_t work;
  float* partial;  // state of each split when the splits are tasks of their own, else null
};

// Running softmax of `rows` rows: maximum, sum, weighted values.
struct State {
  float *m, *l, *o;
  static int64_t floats(int64_t rows, int64_t Dp) { return (rows * 2 + 15) / 16 * 16 + rows * Dp; }
  State(float* p, int64_t rows) : m(p), l(p + rows), o(p + (rows * 2 + 15) / 16 * 16) {}
};

thread_local Scratch scratch, keys_scratch;

struct Keys { int64_t lo, hi; };  // [lo, hi) of one row

// Of a row of the first KV head: the others are alike.
Keys keys_of(const Args& a, const Task& t, int64_t row) {
  int64_t G = a.heads / a.kv_heads, len = a.start[t.request + 1] - a.start[t.request];
  int64_t pos = a.lens[t.request] - len + t.first_query + row / G;
  int64_t lo = a.window > 0 && pos + 1 > a.window ? pos + 1 - a.window : 0;
  return {lo, pos + 1};
}

// Whether so few rows share a V that copying it is not worth while.
bool reads_cache(const Args& a, int64_t per_head) { return per_head <= MR_MAX && a.DV % VL == 0; }

// Where the keys of a block lie in the caches, at the first KV head; null outside [lo, hi) of the task.
template <class T> struct Block {
  const T *k[KB], *v[KB];
  void find(const Args& a, const Task& t, int64_t base, int64_t lo, int64_t hi) {
    const int32_t* table = a.table + t.request * a.table0;
    int begin = (int)(lo > base ? lo - base : 0), end = (int)(hi - base < KB ? hi - base : KB);
    if (begin > 0 || end < KB) std::memset((void*)this, 0, sizeof(*this));
    while (begin < end) {
      int64_t pos = base + begin, offset = (uint32_t)pos % (uint32_t)a.block_size;
      int64_t id = table[(uint32_t)pos / (uint32_t)a.block_size];
      const T* kr = (const T*)a.k_cache + id * a.kc0 + t.kv_head * a.kc1 + offset * a.kc2;
      const T* vr = (const T*)a.v_cache + id * a.vc0 + t.kv_head * a.vc1 + offset * a.vc2;
      int64_t run = a.block_size - offset < end - begin ? a.block_size - offset : end - begin;
      for (int64_t i = 0; i < run; i++, kr += a.kc2, vr += a.vc2) k[begin + i] = kr, v[begin + i] = vr;
      begin += (int)run;
    }
  }
};

int64_t padded_row(int64_t D) { return (D + 2 * VL - 1) / (2 * VL) * (2 * VL); }

// A row of the next block is asked for while this block is in use; null does nothing.
template <class T> INLINE void prefetch_row(const T* row, int64_t head, int64_t D) {
  if (row)
    for (int64_t d = 0; d < D; d += 64 / sizeof(T)) __builtin_prefetch(row + head + d, 0, 2);
}

// Rows of a block, at `head`, and of the next one where they are yet to be asked for.
template <class P> struct Rows { const P* const *now, *const *next; int64_t head; };

// e4m3 is decoded to float16, whose exponents are its own and 8 more: the bits move into place, and scales make up for
// the difference. A NaN stays one.
template <class C> constexpr float UNIT = std::is_same_v<C, e4m3> ? 256.0f : 1.0f;
constexpr int CODES = 2 * VL;  // decoded at a time
INLINE void decode(const uint8_t* from, fp16* to) {
  typedef uint16_t vw __attribute__((vector_size(4 * VL)));
#if defined(__AVX512F__) && defined(__AVX512BW__)
  vw h = (vw)_mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)from)) << 7;
#elif defined(__AVX2__) && defined(__FMA__)
  vw h = (vw)_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)from)) << 7;
#else
  typedef uint8_t vc __attribute__((vector_size(2 * VL)));
  vw h = __builtin_convertvector(load_bits<vc>(from), vw) << 7;
#endif
  vw nan = (vw)((h & 0x3f80) == 0x3f80) & 0x7c00;
  store_bits(to, (vw)((h + (h & 0x4000)) | nan));  // the sign one place up
}

// The rows of a cache of P where they lie; those of e4m3 decoded into `room`, as `rows` then lists them.
template <class P> struct Room { P* room; const P* rows[KB]; };
template <class C, class P>
Rows<P> readable(int64_t D, int64_t head, const C* const* now, const C* const* next, Room<P>& to) {
  if constexpr (std::is_same_v<C, P>) {
    return {now, next, head};
  } else {
    static const P* const asked[KB] = {};
    P* row = to.room;
    for (int i = 0; i < KB; i++, row += padded_row(D)) {
      prefetch_row(next[i], head, D);
      to.rows[i] = now[i] ? row : nullptr;
      if (!now[i]) continue;
      const uint8_t* from = (const uint8_t*)(now[i] + head);
      int64_t d = 0;
      for (; d + CODES <= D; d += CODES) decode(from + d, row + d);
      if (d == D) continue;
      uint8_t part[CODES] = {};
      std::memcpy(part, from + d, D - d);
      decode(part, row + d);
    }
    return {to.rows, asked, 0};
  }
}

// K at `head` from the rows, transposed, in panels [KB/NR] of padded_k(D) x NR as gemm.h has them; keys outside the task become 0.
template <class T> void load_keys(int64_t D, int64_t head, const T* const* rows, const T* const* next, T* kt) {
  constexpr int PER = 4 / sizeof(T);                     // elements in a word: two d of a key
  constexpr int PAIR = std::is_same_v<T, bf16> ? 2 : 1;  // of them side by side in a panel
  for (int i = 0; i < KB; i += VL) {
    T* to = kt + i / NR * padded_k<T>(D) * NR + i % NR * PAIR;
    const T* const* row = rows + i;
    for (int64_t d = 0; d < D; d += VL * PER) {
      int64_t left = D - d;
      vu m[VL];
#pragma GCC unroll 16
      for (int j = 0; j < VL; j++) {
        if (!row[j]) m[j] = vu{};
        else if (left >= VL * PER) m[j] = load_bits<vu>(row[j] + head + d);
        else {
          T part[VL * PER] = {};
          std::memcpy(part, row[j] + head + d, left * sizeof(T));
          m[j] = load_bits<vu>(part);
        }
      }
      transpose(m);
      int n = (int)(left < VL * PER ? left : VL * PER);
#pragma GCC unroll 16
      for (int j = 0; j < VL; j++) {
        T* word = to + (d + j * PER) * NR;
        if (j * PER >= n) break;
        if constexpr (std::is_same_v<T, fp16>) {
          store_bits(word, narrow(m[j]));
          if (j * PER + 1 < n) store_bits(word + NR, narrow(m[j] >> 16));
        } else {
          store_bits(word, m[j]);
        }
      }
    }
    for (int j = 0; j < VL; j++) prefetch_row(next[i + j], head, D);
  }
}

// V in fp32 panels [Dp/NR][KB][NR]; places of keys outside the task are left as they are.
template <class T>
void load_values(int64_t D, int64_t Dp, int64_t head, const T* const* rows, const T* const* next, float* v) {
  for (int i = 0; i < KB; i++) {
    prefetch_row(next[i], head, D);
    if (!rows[i]) continue;
    const T* row = rows[i] + head;
    for (int64_t d = 0; d < Dp; d += VL) {
      vf x = D - d >= VL ? load(row + d) : D > d ? load_part(row + d, (int)(D - d)) : vf{};
      store(v + d / NR * KB * NR + i * NR + d % NR, x);
    }
  }
}

// O[rows][Dp] += P[rows][k0, k1) V[k0, k1) out of the panels that load_values made
INLINE void add_values(int rows, int64_t k0, int64_t k1, int64_t Dp, const float* p, const float* v, float* o) {
  if (k0 >= k1) return;
  int panels = (int)(Dp / NR), group = panels_of_tile(rows);
  for (int i = 0; i < panels; i += group)
    tile(rows, panels - i < group ? panels - i : group, k1 - k0, p + k0, KB, v + i * KB * NR + k0 * NR, KB * NR,
         o + i * NR, Dp, true);
}

// The same for the few rows of a decode step, straight from the cache: NV registers of columns at `at` from the rows.
template <class T, int MR, int NV>
void add_cached(int64_t k0, int64_t k1, int64_t at, const float* p, const T* const* v, const T* const* next, float* o,
                int64_t Dp) {
  vf acc[MR][NV];
#pragma GCC unroll 4
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) acc[r][j] = load(o + r * Dp + j * VL);
  for (int64_t k = k0; k < k1; k++) {
    if (next[k]) __builtin_prefetch(next[k] + at, 0, 2), __builtin_prefetch(next[k] + at + NV * VL - 1, 0, 2);
    vf w[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) w[j] = load(v[k] + at + j * VL);
#pragma GCC unroll 4
    for (int r = 0; r < MR; r++) {
      vf x = splat(p[r * KB + k]);
#pragma GCC unroll 4
      for (int j = 0; j < NV; j++) acc[r][j] = fma(x, w[j], acc[r][j]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) store(o + r * Dp + j * VL, acc[r][j]);
}
template <class T>
void add_cached(int rows, int64_t k0, int64_t k1, int64_t D, int64_t Dp, int64_t head, const float* p,
                const T* const* v, const T* const* next, float* o) {
  if (k0 >= k1) return;
  for (int r = 0; r < rows; r += 4) {
    int n = rows - r < 4 ? rows - r : 4;
    const float* pr = p + r * KB;
    float* to = o + r * Dp;
    for (int64_t d = 0; d < D;) {
      auto columns = [&](auto width) {
        constexpr int NV = decltype(width)::value;
        if (n == 1) add_cached<T, 1, NV>(k0, k1, head + d, pr, v, next, to + d, Dp);
        if (n == 2) add_cached<T, 2, NV>(k0, k1, head + d, pr, v, next, to + d, Dp);
        if (n == 3) add_cached<T, 3, NV>(k0, k1, head + d, pr, v, next, to + d, Dp);
        if (n == 4) add_cached<T, 4, NV>(k0, k1, head + d, pr, v, next, to + d, Dp);
        d += NV * VL;
      };
      if (D - d >= 4 * VL) columns(std::integral_constant<int, 4>{});
      else columns(std::integral_constant<int, 1>{});
    }
  }
}

// The keys of a row that lie in the block at `base`, counted from it; empty when hi <= lo.
INLINE Keys in_block(Keys k, int64_t base) {
  return {k.lo > base ? k.lo - base : 0, k.hi - base < KB ? k.hi - base : KB};
}

// cap * tanh(x / cap) of n scores.
INLINE void cap_scores(float* x, int64_t n, float cap) {
  for (int64_t j = 0; j < n; j += VL) {
    vf y = load(x + j) * (1 / cap), y2 = y * y;
    vf near = y * (1.0f - y2 * (1 / 3.0f - y2 * (2 / 15.0f)));
    vf far = 1.0f - 2.0f / (exp(y + y) + 1.0f);
    store(x + j, cap * (y2 < splat(0.01f) ? near : far));
  }
}

// Scores of a row -> weights of its keys [lo, hi) relative to the new maximum, others 0; updates the row's state.
INLINE void softmax_row(float* x, Keys keys, float* m, float* l, float* o, int64_t Dp) {
  const int end = (int)((keys.hi + VL - 1) / VL * VL);
  const bool whole = keys.lo == 0 && keys.hi == end;
  const vi lo = vi{} + (int)keys.lo, hi = vi{} + (int)keys.hi;
  vi lane;
  for (int j = 0; j < VL; j++) lane[j] = j;
  vf top = splat(-INF);
  for (int j = 0; j < end; j += VL) {
    vf y = load(x + j);
    if (!whole) y = (lane + j >= lo) & (lane + j < hi) ? y : splat(-INF);
    top = y > top ? y : top;
  }
  float peak = max(top);
  peak = peak > *m ? peak : *m;
  vf total = {};
  for (int j = 0; j < end; j += VL) {
    vf y = exp(load(x + j) - splat(peak));
    if (!whole) y = (lane + j >= lo) & (lane + j < hi) ? y : vf{};
    total += y;
    store(x + j, y);
  }
  if (peak == *m) {
    *l += sum(total);
    return;
  }
  float decay = exp(splat(*m - peak))[0];
  *m = peak;
  *l = *l * decay + sum(total);
  for (int64_t d = 0; d < Dp; d += VL) store(o + d, load(o + d) * decay);
}

// The rows of a task over one split, from an empty state. `block` has room for K, then V of a block; p for the scores
// [per_head][KB]; `decoded` for the rows of both where the caches are e4m3. A block is done for all KV heads before the next: they lie side by side in memory.
template <class P, class C>
void run_split(const Args& a, const Task& t, int64_t split, const Keys* keys, const float* q_rows, int64_t Dp,
               State state, float* block, float* p, P* decoded) {
  std::fill(state.m, state.m + t.rows, -INF);
  std::fill(state.l, state.l + t.rows, 0.0f);
  std::fill(state.o, state.o + t.rows * Dp, 0.0f);
  const int64_t Kp = padded_k<P>(a.D), lo = keys[0].lo, hi = keys[t.per_head - 1].hi;
  const bool cached = reads_cache(a, t.per_head);
  P* kt = (P*)block;
  int64_t begin = split * SPLIT, end = begin + SPLIT < hi ? begin + SPLIT : hi;
  if (lo > begin) begin = lo / KB * KB;
  const bool one = a.v_cache == a.k_cache && a.vc0 == a.kc0 && a.vc1 == a.kc1 && a.vc2 == a.kc2 && a.DV <= a.D;
  Room<P> k_room{decoded}, v_room{decoded + KB * padded_row(a.D)};
  Block<C> two[2];
  two[0].find(a, t, begin, lo, hi);
  for (int64_t base = begin, i = 0; base < end; base += KB, i ^= 1) {
    const Block<C>& now = two[i];
    Block<C>& next = two[i ^ 1];
    next.find(a, t, base + KB, lo, hi);
    for (int64_t head = 0; head < t.kv_heads; head++) {
      const float* q = q_rows + head * t.per_head * Kp;
      float *m = state.m + head * t.per_head, *l = state.l + head * t.per_head, *o = state.o + head * t.per_head * Dp;
      const Rows<P> k = readable(a.D, head * a.kc1, now.k, next.k, k_room);
      load_keys(a.D, k.head, k.now, k.next, kt);
      for_tiles(t.per_head, [&](int64_t r0, int rows) {
        int64_t tile_hi = in_block(keys[r0 + rows - 1], base).hi;
        if (tile_hi <= in_block(keys[r0], base).lo) return;
        int panels = (int)((tile_hi + NR - 1) / NR), group = panels_of_tile(rows);
        for (int i = 0; i < panels; i += group)
          tile(rows, panels - i < group ? panels - i : group, Kp, q + r0 * Kp, Kp, kt + i * Kp * NR, Kp * NR,
               p + r0 * KB + i * NR, KB, false);
        for (int64_t r = r0; r < r0 + rows; r++)
          if (Keys k = in_block(keys[r], base); k.lo < k.hi) {
            if (a.cap != 0) cap_scores(p + r * KB, (k.hi + VL - 1) / VL * VL, (float)a.cap);
            softmax_row(p + r * KB, k, m + r, l + r, o + r * Dp, Dp);
          }
      });
      const Rows<P> v = one ? k : readable(a.DV, head * a.vc1, now.v, next.v, v_room);
      if (!cached) load_values(a.DV, Dp, v.head, v.now, v.next, block);
      for_tiles(t.per_head, [&](int64_t r0, int rows) {
        auto add = [&](int64_t r, int n, int64_t k0, int64_t k1) {
          if (cached) add_cached(n, k0, k1, a.DV, Dp, v.head, p + r * KB, v.now, v.next, o + r * Dp);
          else add_values(n, k0, k1, Dp, p + r * KB, block, o + r * Dp);
        };
        // keys that all rows of the tile see, and what single rows see before and after them
        int64_t c0 = in_block(keys[r0 + rows - 1], base).lo, c1 = in_block(keys[r0], base).hi;
        if (c0 > c1) c1 = c0;
        auto alone = [&](int64_t from, int64_t to) {
          for (int64_t r = r0; r < r0 + rows; r++) {
            Keys k = in_block(keys[r], base);
            add(r, 1, k.lo > from ? k.lo : from, k.hi < to ? k.hi : to);
          }
        };
        alone(0, c0);
        add(r0, rows, c0, c1);
        alone(c1, KB);
      });
    }
  }
}

// total = merge of total and s, row by row. A state that saw no key has l = 0 (a NaN is not 0 and stays).
void merge(State total, State s, int64_t rows, int64_t Dp) {
  for (int64_t r = 0; r < rows; r++) {
    if (s.l[r] == 0.0f) continue;
    float *to = total.o + r * Dp, *from = s.o + r * Dp;
    if (total.l[r] == 0.0f) {
      total.m[r] = s.m[r];
      total.l[r] = s.l[r];
      std::memcpy(to, from, Dp * 4);
      continue;
    }
    float m = total.m[r] > s.m[r] ? total.m[r] : s.m[r];
    float e0 = exp(splat(total.m[r] - m))[0], e1 = exp(splat(s.m[r] - m))[0];
    total.m[r] = m;
    total.l[r] = fma(splat(total.l[r]), splat(e0), splat(s.l[r] * e1))[0];
    for (int64_t d = 0; d < Dp; d += VL) store(to + d, fma(load(to + d), splat(e0), load(from + d) * e1));
  }
}

// `unit`: of the values.
template <class T> void write_rows(const Args& a, const Task& t, State s, int64_t Dp, float unit) {
  int64_t G = a.heads / a.kv_heads;
  for (int64_t r = 0; r < t.rows; r++) {
    int64_t in_head = r % t.per_head, head = (t.kv_head + r / t.per_head) * G + in_head % G;
    int64_t row = a.start[t.request] + t.first_query + in_head / G;
    T* to = (T*)a.out + row * a.out0 + head * a.out1;
    const float* o = s.o + r * Dp;
    float scale = unit / s.l[r];
    if (a.sinks) {
      float m = s.m[r], sink = a.sinks[head], top = sink > m ? sink : m;
      float kept = exp(splat(m - top))[0];
      scale = kept * unit / (s.l[r] * kept + exp(splat(sink - top))[0]);
    }
    for (int64_t d = 0; d < a.DV; d += VL) {
      if (a.DV - d >= VL) store(to + d, load(o + d) * scale);
      else store_part(to + d, load(o + d) * scale, (int)(a.DV - d));
    }
  }
}

// q and the result are T, the caches C.
template <class T, class C> int attention(const Args& a) {
  using P = std::conditional_t<std::is_same_v<C, e4m3>, fp16, T>;  // of panels
  int threads = (int)a.threads;
  int64_t G = a.heads / a.kv_heads, Dp = (a.DV + NR - 1) / NR * NR;
  int64_t per_task = ROWS / G < 1 ? 1 : ROWS / G;
  std::vector<Task> tasks;
  int64_t work = 0;
  for (int64_t r = 0; r < a.requests; r++) {
    int64_t len = a.lens[r], queries = a.start[r + 1] - a.start[r];
    if (queries < 0 || len < 0 || a.start[r + 1] > a.tokens) return 1;
    if (len == 0 || queries == 0) continue;
    if (queries > len || len > a.table_blocks * a.block_size) return 1;
    int64_t first_key = a.window > 0 && len - queries + 1 > a.window ? len - queries + 1 - a.window : 0;
    for (int64_t b = first_key / a.block_size; b * a.block_size < len; b++) {
      int32_t block = a.table[r * a.table0 + b];
      if (block < 0 || block >= a.blocks) return 2;
    }
    int64_t n = (queries + per_task - 1) / per_task;
    int64_t together = n == 1 && reads_cache(a, queries * G) && a.requests >= 4 * threads ? a.kv_heads : 1;
    for (int64_t i = 0; i < n; i++) {
      int64_t q0 = queries * i / n, q1 = queries * (i + 1) / n, per_head = (q1 - q0) * G;
      for (int64_t h = 0; h < a.kv_heads; h += together) {
        Task t{r, h, together, q0, q1 - q0, per_head, per_head * together, 0, 0, 0, nullptr};
        int64_t lo = keys_of(a, t, 0).lo, hi = keys_of(a, t, per_head - 1).hi;
        t.first_split = lo / SPLIT;
        t.splits = (hi + SPLIT - 1) / SPLIT - t.first_split;
        t.work = (hi - lo) * t.rows * a.D;
        work += t.work;
        tasks.push_back(t);
      }
    }
  }
  // The longest come first, so that the threads finish together.
  std::stable_sort(tasks.begin(), tasks.end(), [](const Task& x, const Task& y) { return x.work > y.work; });
  int64_t n = (int64_t)tasks.size();
  if (work < (128 << 10)) threads = 1;

  // Too few tasks to keep the threads busy: every split is a task, the last step merges them.
  std::vector<std::pair<int64_t, int64_t>> parts;
  float* partial = nullptr;
  if (threads > 1 && n < 2 * threads) {
    int64_t floats = 0;
    for (Task& t : tasks)
      if (t.splits > 1) floats += t.splits * State::floats(t.rows, Dp);
    if (floats) {
      thread_local Scratch partial_scratch;
      partial = partial_scratch.get<float>(floats);
      float* p = partial;
      for (int64_t i = 0; i < n; i++) {
        if (tasks[i].splits > 1) {
          tasks[i].partial = p;
          p += tasks[i].splits * State::floats(tasks[i].rows, Dp);
        }
        for (int64_t s = 0; s < (tasks[i].splits > 1 ? tasks[i].splits : 1); s++) parts.push_back({i, s});
      }
    }
  }

  auto run = [&](const Task& t, int64_t split0, int64_t splits) {
    int64_t state = State::floats(t.rows, Dp);
    int64_t Kp = padded_k<P>(a.D), q_size = (t.rows * Kp + 15) / 16 * 16;
    int64_t block_size = KB * std::max(Dp, (Kp * (int64_t)sizeof(P) + 3) / 4);
    int64_t decoded = std::is_same_v<C, P> ? 0 : KB * (padded_row(a.D) + padded_row(a.DV)) * (int64_t)sizeof(P) / 4;
    float* mem = scratch.get<float>(block_size + t.per_head * KB + q_size + 2 * state + decoded);
    float *block = mem, *p = block + block_size, *q = p + t.per_head * KB, *states = q + q_size;
    P* rows = (P*)(states + 2 * state);
    Keys* keys = keys_scratch.get<Keys>(t.per_head);
    for (int64_t r = 0; r < t.per_head; r++) keys[r] = keys_of(a, t, r);
    for (int64_t r = 0; r < t.rows; r++) {
      int64_t in_head = r % t.per_head, head = (t.kv_head + r / t.per_head) * G + in_head % G;
      int64_t row = a.start[t.request] + t.first_query + in_head / G;
      widen_row((const T*)a.q + row * a.q0 + head * a.q1, a.D, Kp, q + r * Kp);
      for (int64_t d = 0; d < a.D; d++) q[r * Kp + d] *= (float)a.scale * UNIT<C>;
    }
    if (t.partial) {
      run_split<P, C>(a, t, t.first_split + split0, keys, q, Dp, State(t.partial + split0 * state, t.rows), block, p, rows);
      return;
    }
    State total(states, t.rows), one(states + state, t.rows);
    run_split<P, C>(a, t, t.first_split, keys, q, Dp, total, block, p, rows);
    for (int64_t s = 1; s < splits; s++) {
      run_split<P, C>(a, t, t.first_split + s, keys, q, Dp, one, block, p, rows);
      merge(total, one, t.rows, Dp);
    }
    write_rows<T>(a, t, total, Dp, (float)a.v_scale * UNIT<C>);
  };
  if (partial) {
    for_tasks(threads, (int64_t)parts.size(), [&](int64_t i) {
      const Task& t = tasks[parts[i].first];
      run(t, parts[i].second, t.splits);
    });
    for (const Task& t : tasks) {
      if (!t.partial) continue;
      State total(t.partial, t.rows);
      for (int64_t s = 1; s < t.splits; s++)
        merge(total, State(t.partial + s * State::floats(t.rows, Dp), t.rows), t.rows, Dp);
      write_rows<T>(a, t, total, Dp, (float)a.v_scale * UNIT<C>);
    }
  } else {
    for_tasks(threads, n, [&](int64_t i) { run(tasks[i], 0, tasks[i].splits); });
  }
  for (int64_t row = a.start[a.requests]; row < a.tokens; row++)
    for (int64_t h = 0; h < a.heads; h++) std::memset((T*)a.out + row * a.out0 + h * a.out1, 0, a.DV * sizeof(T));
  return 0;
}

}  // namespace

// 0 when done; 1: a request's lengths contradict each other or its table; 2: a block id outside the cache.
OPERATOR(vc_paged_attention, Args) {
  int64_t rc = 0;
  with_type(a->dtype, [&](auto t) {
    using T = decltype(t);
    rc = a->codes ? attention<T, e4m3>(*a) : attention<T, T>(*a);
  });
  return rc;
}
