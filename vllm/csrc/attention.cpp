// SPDX-License-Identifier: Apache-2.0
// Causal grouped-query attention over the paged cache; prefill and decode are one algorithm.
//
// The keys of a request are cut at absolute positions into blocks of KB and splits of SPLIT. A row (query, head) runs an
// online softmax over the blocks of a split, and the splits are merged in rising order. The cuts depend on nothing but
// the position, and the tile kernel gives a row the same value in any tile: so a row's result is bitwise the same alone
// or in a batch, for any chunking of the prompt and any number of threads.
//
// A key outside a row's range never enters its sums, not even with weight 0: unwritten slots may hold NaN.
#include <vector>

#include "gemm.h"

namespace {

constexpr int KB = 64;
constexpr int SPLIT = 512;
constexpr int ROWS = 8 * MR_MAX;  // rows of a task, where the head group allows
static_assert(KB % NR == 0 && SPLIT % KB == 0);

struct Args {
  const void *q, *k_cache, *v_cache;
  int64_t q0, q1, kc0, kc1, vc0, vc1;
  const int32_t* table;
  int64_t table0;
  const int32_t *start, *lens;
  int64_t requests, tokens, heads, kv_heads, D, blocks, block_size, table_blocks;
  float scale;
  int64_t window;
  void* out;
  int64_t out0, out1;
};

struct Task {
  int64_t request, kv_head;
  int64_t first_query, queries;  // within the request
  int64_t first_split, splits;
  int64_t rows;
  float* partial;  // state of each split when the splits are tasks of their own, else null
};

// Running softmax of `rows` rows: maximum, sum, weighted values.
struct State {
  float *m, *l, *o;
  static int64_t floats(int64_t rows, int64_t Dp) { return (rows * 2 + 15) / 16 * 16 + rows * Dp; }
  State(float* p, int64_t rows) : m(p), l(p + rows), o(p + (rows * 2 + 15) / 16 * 16) {}
};

thread_local Scratch scratch;

struct Keys { int64_t lo, hi; };  // [lo, hi) of one row, absolute

INLINE Keys keys_of(const Args& a, const Task& t, int64_t row) {
  int64_t G = a.heads / a.kv_heads, len = a.start[t.request + 1] - a.start[t.request];
  int64_t pos = a.lens[t.request] - len + t.first_query + row / G;
  int64_t lo = a.window > 0 && pos + 1 > a.window ? pos + 1 - a.window : 0;
  return {lo, pos + 1};
}

// Keys [lo, hi) of the block at `base` to fp32: K transposed into panels [KB/NR][D][NR], V into panels [Dp/NR][KB][NR].
// Places outside [lo, hi) are set to 0.
template <class T>
void load_block(const Args& a, const Task& t, int64_t base, int64_t lo, int64_t hi, int64_t Dp, float* kt, float* v) {
  const int32_t* table = a.table + t.request * a.table0;
  for (int64_t i = 0; i < KB; i++) {
    int64_t pos = base + i;
    float* kd = kt + i / NR * a.D * NR + i % NR;
    float* vd = v + i * NR;
    if (pos < lo || pos >= hi) {
      for (int64_t d = 0; d < a.D; d++) kd[d * NR] = 0;
      for (int64_t d = 0; d < Dp; d += VL) store(vd + d / NR * KB * NR + d % NR, vf{});
      continue;
    }
    int64_t block = table[pos / a.block_size], at = pos % a.block_size * a.D;
    const T* kr = (const T*)a.k_cache + block * a.kc0 + t.kv_head * a.kc1 + at;
    const T* vr = (const T*)a.v_cache + block * a.vc0 + t.kv_head * a.vc1 + at;
    for (int64_t d = 0; d < a.D; d++) kd[d * NR] = to_float(kr[d]);
    for (int64_t d = 0; d < Dp; d += VL) {
      vf x = a.D - d >= VL ? load(vr + d) : a.D > d ? load_part(vr + d, (int)(a.D - d)) : vf{};
      store(vd + d / NR * KB * NR + d % NR, x);
    }
  }
}

// O[rows][Dp] += P[rows][k0, k1) V[k0, k1)
INLINE void add_values(int rows, int64_t k0, int64_t k1, int64_t Dp, const float* p, const float* v, float* o) {
  if (k0 >= k1) return;
  int panels = (int)(Dp / NR), group = panels_of_tile(rows);
  for (int i = 0; i < panels; i += group)
    tile<float>(rows, panels - i < group ? panels - i : group, k1 - k0, p + k0, KB, v + i * KB * NR + k0 * NR, KB * NR,
                o + i * NR, Dp, true);
}

// The rows of a task over one split, from an empty state.
template <class T>
void run_split(const Args& a, const Task& t, int64_t split, const float* q, int64_t Dp, State s, float* kt, float* v,
               float* p) {
  std::fill(s.m, s.m + t.rows, -INF);
  std::fill(s.l, s.l + t.rows, 0.0f);
  std::fill(s.o, s.o + t.rows * Dp, 0.0f);
  int64_t task_lo = keys_of(a, t, 0).lo, task_hi = keys_of(a, t, t.rows - 1).hi;
  int64_t begin = split * SPLIT, end = begin + SPLIT;
  if (task_hi < end) end = task_hi;
  if (task_lo > begin) begin = task_lo / KB * KB;
  for (int64_t base = begin; base < end; base += KB) {
    load_block<T>(a, t, base, task_lo, task_hi, Dp, kt, v);
    for_tiles(t.rows, [&](int64_t r0, int rows) {
      int64_t hi = keys_of(a, t, r0 + rows - 1).hi - base, lo = keys_of(a, t, r0).lo - base;
      if (hi <= 0 || lo >= KB) return;
      int panels = (int)((hi < KB ? hi + NR - 1 : KB) / NR), group = panels_of_tile(rows);
      for (int i = 0; i < panels; i += group)
        tile<float>(rows, panels - i < group ? panels - i : group, a.D, q + r0 * a.D, a.D, kt + i * a.D * NR, a.D * NR,
                    p + i * NR, KB, false);
      int64_t row_lo[MR_MAX], row_hi[MR_MAX], common_lo = 0, common_hi = KB;
      for (int r = 0; r < rows; r++) {
        Keys k = keys_of(a, t, r0 + r);
        row_lo[r] = k.lo - base > 0 ? k.lo - base : 0;
        row_hi[r] = k.hi - base < KB ? k.hi - base : KB;
        if (row_lo[r] > common_lo) common_lo = row_lo[r];
        if (row_hi[r] < common_hi) common_hi = row_hi[r];
        if (row_lo[r] >= row_hi[r]) continue;
        float* x = p + r * KB;
        vf top = splat(-INF);
        const vi lane = [] { vi i; for (int j = 0; j < VL; j++) i[j] = j; return i; }();
        for (int j = 0; j < panels * NR; j += VL) {
          vi key = lane + j;
          vf y = load(x + j);
          y = (key >= (int)row_lo[r]) & (key < (int)row_hi[r]) ? y : splat(-INF);
          top = y > top ? y : top;
        }
        float m = max(top);
        m = m > s.m[r0 + r] ? m : s.m[r0 + r];
        vf total = {};
        for (int j = 0; j < panels * NR; j += VL) {
          vi key = lane + j;
          vf y = exp(load(x + j) - m);
          y = (key >= (int)row_lo[r]) & (key < (int)row_hi[r]) ? y : vf{};
          total += y;
          store(x + j, y);
        }
        float decay = exp(splat(s.m[r0 + r] - m))[0];
        s.m[r0 + r] = m;
        s.l[r0 + r] = s.l[r0 + r] * decay + sum(total);
        if (decay != 1.0f)
          for (int64_t d = 0; d < Dp; d += VL) {
            float* o = s.o + (r0 + r) * Dp + d;
            store(o, load(o) * decay);
          }
      }
      if (common_lo >= common_hi) {
        for (int r = 0; r < rows; r++)
          add_values(1, row_lo[r], row_hi[r], Dp, p + r * KB, v, s.o + (r0 + r) * Dp);
        return;
      }
      for (int r = 0; r < rows; r++)
        add_values(1, row_lo[r], common_lo, Dp, p + r * KB, v, s.o + (r0 + r) * Dp);
      add_values(rows, common_lo, common_hi, Dp, p, v, s.o + r0 * Dp);
      for (int r = 0; r < rows; r++)
        add_values(1, common_hi, row_hi[r], Dp, p + r * KB, v, s.o + (r0 + r) * Dp);
    });
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

template <class T> void write_rows(const Args& a, const Task& t, State s, int64_t Dp) {
  int64_t G = a.heads / a.kv_heads;
  for (int64_t r = 0; r < t.rows; r++) {
    int64_t row = a.start[t.request] + t.first_query + r / G, head = t.kv_head * G + r % G;
    T* to = (T*)a.out + row * a.out0 + head * a.out1;
    const float* o = s.o + r * Dp;
    float scale = 1.0f / s.l[r];
    for (int64_t d = 0; d < a.D; d += VL) {
      if (a.D - d >= VL) store(to + d, load(o + d) * scale);
      else store_part(to + d, load(o + d) * scale, (int)(a.D - d));
    }
  }
}

template <class T> int attention(const Args& a, int threads) {
  int64_t G = a.heads / a.kv_heads, Dp = (a.D + NR - 1) / NR * NR;
  int64_t per_task = ROWS / G < 1 ? 1 : ROWS / G;
  std::vector<Task> tasks;
  int64_t work = 0;
  // Later queries see more keys: the longest tasks come first, so that threads finish together.
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
    for (int64_t i = n - 1; i >= 0; i--) {
      int64_t q0 = queries * i / n, q1 = queries * (i + 1) / n;
      for (int64_t h = 0; h < a.kv_heads; h++) {
        Task t{r, h, q0, q1 - q0, 0, 0, (q1 - q0) * G, nullptr};
        int64_t lo = keys_of(a, t, 0).lo, hi = keys_of(a, t, t.rows - 1).hi;
        t.first_split = lo / SPLIT;
        t.splits = (hi + SPLIT - 1) / SPLIT - t.first_split;
        work += (hi - lo) * t.rows * a.D;
        tasks.push_back(t);
      }
    }
  }
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
    float* mem = scratch.get<float>(KB * a.D + KB * Dp + MR_MAX * KB + t.rows * a.D + 2 * state + 16);
    float *kt = mem, *v = kt + KB * a.D, *p = v + KB * Dp, *q = p + MR_MAX * KB, *states = q + (t.rows * a.D + 15) / 16 * 16;
    for (int64_t r = 0; r < t.rows; r++) {
      int64_t row = a.start[t.request] + t.first_query + r / G, head = t.kv_head * G + r % G;
      widen_row((const T*)a.q + row * a.q0 + head * a.q1, a.D, a.D, q + r * a.D);
      for (int64_t d = 0; d < a.D; d++) q[r * a.D + d] *= a.scale;
    }
    if (t.partial) {
      run_split<T>(a, t, t.first_split + split0, q, Dp, State(t.partial + split0 * state, t.rows), kt, v, p);
      return;
    }
    State total(states, t.rows), one(states + state, t.rows);
    run_split<T>(a, t, t.first_split, q, Dp, total, kt, v, p);
    for (int64_t s = 1; s < splits; s++) {
      run_split<T>(a, t, t.first_split + s, q, Dp, one, kt, v, p);
      merge(total, one, t.rows, Dp);
    }
    write_rows<T>(a, t, total, Dp);
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
      write_rows<T>(a, t, total, Dp);
    }
  } else {
    for_tasks(threads, n, [&](int64_t i) { run(tasks[i], 0, tasks[i].splits); });
  }
  for (int64_t row = a.start[a.requests]; row < a.tokens; row++)
    for (int64_t h = 0; h < a.heads; h++) std::memset((T*)a.out + row * a.out0 + h * a.out1, 0, a.D * sizeof(T));
  return 0;
}

}  // namespace

// 0 when done; 1: a request's lengths contradict each other or its table; 2: a block id outside the cache.
EXPORT int vc_paged_attention(int dtype, const void* q, int64_t q0, int64_t q1, const void* k_cache, int64_t kc0,
                              int64_t kc1, const void* v_cache, int64_t vc0, int64_t vc1, const int32_t* table,
                              int64_t table0, const int32_t* start, const int32_t* lens, int64_t requests,
                              int64_t tokens, int64_t heads, int64_t kv_heads, int64_t D, int64_t blocks,
                              int64_t block_size, int64_t table_blocks, float scale, int64_t window, void* out,
                              int64_t out0, int64_t out1, int threads) {
  Args a{q, k_cache, v_cache, q0, q1, kc0, kc1, vc0, vc1, table, table0, start, lens, requests, tokens, heads, kv_heads,
         D, blocks, block_size, table_blocks, scale, window, out, out0, out1};
  int rc = 0;
  with_type(dtype, [&](auto t) { rc = attention<decltype(t)>(a, threads); });
  return rc;
}
