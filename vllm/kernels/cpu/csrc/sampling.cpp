// SPDX-License-Identifier: Apache-2.0
// The likeliest token of each row.
#include "common.h"

namespace {

constexpr int64_t CHUNK = 8192;  // columns of a task

struct RowMaxArgs {
  int64_t dtype, R, V;
  const void* logits;
  int64_t ldl;
  float* values;
  int64_t *ids, threads;
};

struct Best { float value; int64_t id; };

// The first of the largest of n numbers; a NaN where one is among them.
template <class T> Best best_of(const T* x, int64_t n) {
  vf most = splat(-INF);
  vi nan = {};
  int64_t d = 0;
  for (; d + VL <= n; d += VL) {
    vf v = load(x + d);
    most = v > most ? v : most;
    nan |= v != v;
  }
  float top = max(most);
  for (int i = 0; i < VL; i++)
    if (nan[i]) return {std::numeric_limits<float>::quiet_NaN(), 0};
  for (int64_t i = d; i < n; i++) {
    float v = to_float(x[i]);
    if (v != v) return {v, 0};
    top = v > top ? v : top;
  }
  for (d = 0; d + VL <= n; d += VL) {
    vi equal = load(x + d) == splat(top);
    for (int i = 0; i < VL; i++)
      if (equal[i]) return {top, d + i};
  }
  for (; d < n; d++)
    if (to_float(x[d]) == top) return {top, d};
  return {top, 0};
}

}  // namespace

OPERATOR(vc_row_max, RowMaxArgs) {
  thread_local Scratch scratch;
  int64_t chunks = (a->V + CHUNK - 1) / CHUNK;
  Best* best = scratch.get<Best>(a->R * chunks);
  with_type(a->dtype, [&](auto t) {
    using T = decltype(t);
    for_range((int)a->threads, a->R * chunks, 4, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        int64_t row = i / chunks, first = i % chunks * CHUNK;
        best[i] = best_of((const T*)a->logits + row * a->ldl + first, std::min(CHUNK, a->V - first));
        best[i].id += first;
      }
    });
  });
  for (int64_t r = 0; r < a->R; r++) {
    Best found = best[r * chunks];
    for (int64_t i = 1; i < chunks && found.value == found.value; i++)
      if (Best next = best[r * chunks + i]; !(next.value <= found.value)) found = next;
    a->values[r] = found.value;
    a->ids[r] = found.id;
  }
  return 0;
}
