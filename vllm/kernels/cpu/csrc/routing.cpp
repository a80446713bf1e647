// SPDX-License-Identifier: Apache-2.0
// Which experts a token goes to: scores in float32, of equal experts the one with the lowest number.
#include "common.h"

namespace {

struct RoutingArgs {
  int64_t dtype, T, E, K, sigmoid, renormalize, groups, kept_groups, group_top;
  const void* logits;
  int64_t ldl;
  const float* bias;     // [E] or null
  const int64_t* slots;  // [T]
  float* weights;        // [T, K], as the ids
  int32_t* ids;
  int64_t threads;
  double scale;
};

thread_local Scratch scratch;

// The n largest of the keys at the places [0, size) that pass, largest first, of equals the lowest place first.
template <class P> void largest(int64_t n, int64_t size, const float* key, P&& passes, int32_t* places) {
  int64_t found = 0;
  for (int64_t i = 0; i < size; i++) {
    if ((found == n && !(key[i] > key[places[n - 1]])) || !passes(i)) continue;
    int64_t at = found < n ? found++ : n - 1;
    for (; at > 0 && key[i] > key[places[at - 1]]; at--) places[at] = places[at - 1];
    places[at] = (int32_t)i;
  }
}

template <class T> void route(const RoutingArgs& a, const T* logits, float* weights, int32_t* ids) {
  const int64_t E = a.E, K = a.K, padded = (E + VL - 1) / VL * VL, each = E / a.groups;
  const int64_t most = std::max(a.kept_groups, a.group_top);
  float* score = scratch.get<float>(2 * padded + 2 * a.groups + most);
  float *key = score + padded, *worth = key + padded, *kept = worth + a.groups;
  int32_t* places = (int32_t*)(kept + a.groups);

  for_columns(E, [&](int64_t e, int n) { store(score + e, get(logits + e, n)); });
  std::fill(score + E, score + padded, -INF);
  vf most_of = splat(-INF), sums = {};
  if (!a.sigmoid)
    for (int64_t e = 0; e < padded; e += VL) most_of = at_least(most_of, load(score + e));
  vf top = splat(max(most_of));
  for (int64_t e = 0; e < padded; e += VL) {
    vf x = load(score + e), s = a.sigmoid ? times_sigmoid(splat(1.0f), x) : exp(x - top);
    store(score + e, s);
    sums += s;
  }
  if (!a.sigmoid) {
    vf total = splat(sum(sums));
    for (int64_t e = 0; e < padded; e += VL) store(score + e, load(score + e) / total);
  }
  for (int64_t e = 0; e < E; e++) {
    float k = a.bias ? score[e] + a.bias[e] : score[e];
    key[e] = k == k ? k : INF;  // a row of NaN, too, chooses K experts that exist, once each
  }
  if (a.kept_groups < a.groups) {
    for (int64_t g = 0; g < a.groups; g++) {
      const float* own = key + g * each;
      largest(a.group_top, each, own, [](int64_t) { return true; }, places);
      worth[g] = 0;
      for (int64_t i = 0; i < a.group_top; i++) worth[g] += own[places[i]];
      kept[g] = 0;
    }
    largest(a.kept_groups, a.groups, worth, [](int64_t) { return true; }, places);
    for (int64_t i = 0; i < a.kept_groups; i++) kept[places[i]] = 1;
    largest(K, E, key, [&](int64_t e) { return kept[e / each] != 0; }, ids);
  } else {
    largest(K, E, key, [](int64_t) { return true; }, ids);
  }
  float total = 0;
  for (int64_t k = 0; k < K; k++) total += weights[k] = score[ids[k]];
  if (a.renormalize)
    for (int64_t k = 0; k < K; k++) weights[k] /= total + (a.sigmoid ? 1e-20f : 0.0f);
  for (int64_t k = 0; k < K; k++) weights[k] *= (float)a.scale;
}

}  // namespace

OPERATOR(vc_route, RoutingArgs) {
  with_type(a->dtype, [&](auto t) {
    for_range((int)a->threads, a->T, 1 + (8 << 10) / a->E, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        float* weights = a->weights + i * a->K;
        int32_t* ids = a->ids + i * a->K;
        if (a->slots[i] >= 0) {
          route(*a, (const decltype(t)*)a->logits + i * a->ldl, weights, ids);
        } else {
          std::fill_n(weights, a->K, 0.0f);
          std::fill_n(ids, a->K, -1);
        }
      }
    });
  });
  return 0;
}
