// SPDX-License-Identifier: Apache-2.0
// The gated delta net of one layer between its projections: causal convolution, gated delta rule, gated RMS norm.
//
// One task is one key head of one request with the value heads that it serves. It walks the request's new tokens in
// blocks; q, k and v of a block stay in the L2 cache, and a tile of the state (D rows, TILE registers wide) stays in the
// L1 cache while all tokens of the block pass over it. The rule is applied token after token, for prefill as for decode:
// at these head sizes that takes as many multiply-adds as the chunk-wise form, and a token's result does not depend on
// where a chunk began.
#include "common.h"

namespace {

constexpr int64_t BLOCK = 64;
constexpr int TILE = 2;

thread_local Scratch scratch;

struct Shape {
  int64_t G, H, D, E, K;
  int64_t group() const { return H / G; }
  int64_t channels() const { return 2 * G * D + H * E; }
};

struct Small {
  const float *conv, *rate, *dt_bias, *norm;
  float eps;
};

int64_t round_up(int64_t n) { return (n + VL - 1) / VL * VL; }

INLINE float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
INLINE float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// One walk over NV registers' width of a head's state: S = decay S + k delta where UPDATE, then k·S and q·S where READ.
// Even and odd rows are summed apart, for enough independent chains; the order is the same for every NV.
template <int NV, bool UPDATE, bool READ>
INLINE void walk(float* S, int64_t ld, int64_t D, vf decay, const float* k_update, const vf* delta, const float* k,
                 const float* q, vf* kS, vf* qS) {
  vf k_sum[2][NV] = {}, q_sum[2][NV] = {};
  auto row = [&](int64_t i, int parity) __attribute__((always_inline)) {
    vf ku = UPDATE ? splat(k_update[i]) : vf{}, ki = READ ? splat(k[i]) : vf{}, qi = READ ? splat(q[i]) : vf{};
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) {
      vf s = load(S + i * ld + j * VL);
      if (UPDATE) {
        s = fma(ku, delta[j], s * decay);
        store(S + i * ld + j * VL, s);
      }
      if (READ) {
        k_sum[parity][j] = fma(ki, s, k_sum[parity][j]);
        q_sum[parity][j] = fma(qi, s, q_sum[parity][j]);
      }
    }
  };
  int64_t i = 0;
  for (; i + 2 <= D; i += 2) {
    row(i, 0);
    row(i + 1, 1);
  }
  if (i < D) row(i, 0);
  if (READ)
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) {
      kS[j] = k_sum[0][j] + k_sum[1][j];
      qS[j] = q_sum[0][j] + q_sum[1][j];
    }
}

struct Block {  // n tokens of one value head: strides in floats
  int64_t n;
  const float *q, *k;
  int64_t ldq;
  const float *qk, *decay, *beta;
  int64_t ldb;
  const float* v;
  int64_t ldv;
  float* o;
  int64_t ldo;
};

// The block's tokens over columns [e, e + NV registers) of a state. The update by one token and the reads for the next
// are one walk.
template <int NV> void tokens(float* S, int64_t ld, int64_t D, const Block& b, int64_t e) {
  vf kS[NV], qS[NV], delta[NV];
  walk<NV, false, true>(S, ld, D, vf{}, nullptr, nullptr, b.k, b.q, kS, qS);
  for (int64_t t = 0;; t++) {
    vf decay = splat(b.decay[t * b.ldb]), beta = splat(b.beta[t * b.ldb]), qk = splat(b.qk[t]);
    const float *v = b.v + t * b.ldv + e, *k = b.k + t * b.ldq, *q = b.q + t * b.ldq;
    float* o = b.o + t * b.ldo + e;
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) {
      delta[j] = (load(v + j * VL) - kS[j] * decay) * beta;
      store(o + j * VL, fma(qk, delta[j], qS[j] * decay));
    }
    if (t + 1 == b.n) {
      walk<NV, true, false>(S, ld, D, decay, k, delta, nullptr, nullptr, nullptr, nullptr);
      return;
    }
    walk<NV, true, true>(S, ld, D, decay, k, delta, k + b.ldq, q + b.ldq, kS, qS);
  }
}

// The block over all E columns of a value head's state [D, E], tile by tile.
void tokens(float* S, int64_t D, int64_t E, const Block& b, float* tile) {
  int64_t e = 0;
  if (b.n == 1)
    for (; e + 2 * TILE * VL <= E; e += 2 * TILE * VL) tokens<2 * TILE>(S + e, E, D, b, e);
  for (; e < E; e += TILE * VL) {
    int64_t width = E - e < TILE * VL ? E - e : TILE * VL;
    auto copy = [&](auto&& move) {
      for (int64_t i = 0; i < D; i++)
        for_columns(width, [&](int64_t c, int m) { move(S + i * E + e + c, tile + i * TILE * VL + c, m); });
    };
    copy([](float* s, float* t, int m) { store(t, get(s, m)); });
    if (width > VL) tokens<TILE>(tile, TILE * VL, D, b, e);
    else tokens<1>(tile, TILE * VL, D, b, e);
    copy([](float* s, float* t, int m) { put(s, load(t), m); });
  }
}

// Key head g of one request: rows [0, T) of x and out.
template <class T>
void head(const Shape& dim, const Small& w, int64_t g, int64_t rows, const T* x, int64_t ldx, T* conv_state,
          float* state, T* out, int64_t ldo) {
  const int64_t D = dim.D, E = dim.E, K = dim.K, C = dim.channels(), V = dim.group(), Dp = round_up(D), Ep = round_up(E);
  const int64_t width = 2 * Dp + V * Ep;  // q | k | v heads of this key head, each from a whole register on
  float* mem = scratch.get<float>((K - 1 + BLOCK) * width + BLOCK * (width + Ep + 1 + 2 * V) + D * TILE * VL + 64);
  float* tile = mem;
  float* raw = tile + D * TILE * VL;  // K - 1 inputs of before, then the block's
  float* y = raw + (K - 1 + BLOCK) * width;
  float* o = y + BLOCK * width;
  float* decay = o + BLOCK * Ep;
  float* beta = decay + BLOCK * V;
  float* qk = beta + BLOCK * V;

  auto segments = [&](auto&& fn) {  // fn(channel, place in a row of y, length)
    fn(g * D, (int64_t)0, D);
    fn((dim.G + g) * D, Dp, D);
    for (int64_t h = 0; h < V; h++) fn(2 * dim.G * D + (g * V + h) * E, 2 * Dp + h * Ep, E);
  };
  auto widen = [&](const T* from, float* to) {
    segments([&](int64_t c, int64_t at, int64_t n) {
      for_columns(n, [&](int64_t d, int m) { store(to + at + d, get(from + c + d, m)); });
    });
  };
  for (int64_t j = 0; j < K - 1; j++) widen(conv_state + j * C, raw + j * width);

  for (int64_t t0 = 0; t0 < rows; t0 += BLOCK) {
    const int64_t n = rows - t0 < BLOCK ? rows - t0 : BLOCK;
    for (int64_t t = 0; t < n; t++) {
      const T* row = x + (t0 + t) * ldx;
      float* to = y + t * width;
      widen(row, raw + (K - 1 + t) * width);
      segments([&](int64_t c, int64_t at, int64_t len) {
        for_columns(len, [&](int64_t d, int m) {
          vf sum = {};
          for (int64_t j = 0; j < K; j++) sum = fma(get(w.conv + j * C + c + d, m), load(raw + (t + j) * width + at + d), sum);
          store(to + at + d, silu(sum));
        });
      });
      float *q = to, *k = to + Dp;
      vf qq = {}, kk = {}, dot = {};
      for (int64_t d = 0; d < Dp; d += VL) {
        vf a = load(q + d), b = load(k + d);
        qq = fma(a, a, qq);
        kk = fma(b, b, kk);
        dot = fma(a, b, dot);
      }
      float q_scale = 1.0f / std::sqrt((sum(qq) + 1e-6f) * (float)D), k_scale = 1.0f / std::sqrt(sum(kk) + 1e-6f);
      for (int64_t d = 0; d < Dp; d += VL) {
        store(q + d, load(q + d) * q_scale);
        store(k + d, load(k + d) * k_scale);
      }
      qk[t] = sum(dot) * q_scale * k_scale;
      const T *b = row + C + dim.H * E, *a = b + dim.H;
      for (int64_t h = 0; h < V; h++) {
        int64_t head = g * V + h;
        decay[t * V + h] = std::exp(-w.rate[head] * softplus(to_float(a[head]) + w.dt_bias[head]));
        beta[t * V + h] = sigmoid(to_float(b[head]));
      }
    }
    if (K > 1) std::memmove(raw, raw + n * width, (K - 1) * width * 4);

    for (int64_t h = 0; h < V; h++) {
      int64_t head = g * V + h;
      tokens(state + head * D * E, D, E,
             Block{n, y, y + Dp, width, qk, decay + h, beta + h, V, y + 2 * Dp + h * Ep, width, o, Ep}, tile);
      for (int64_t t = 0; t < n; t++) {
        const float* from = o + t * Ep;
        const T* z = x + (t0 + t) * ldx + C + head * E;
        T* to = out + (t0 + t) * ldo + head * E;
        vf squares = {};
        for_columns(E, [&](int64_t d, int m) {
          vf v = get(from + d, m);
          squares = fma(v, v, squares);
        });
        vf scale = splat(1.0f / std::sqrt(sum(squares) / (float)E + w.eps));
        for_columns(E, [&](int64_t d, int m) {
          put(to + d, get(from + d, m) * scale * get(w.norm + d, m) * silu(get(z + d, m)), m);
        });
      }
    }
  }
  for (int64_t j = 0; j < K - 1; j++)
    segments([&](int64_t c, int64_t at, int64_t n) {
      for_columns(n, [&](int64_t d, int m) { put(conv_state + j * C + c + d, load(raw + j * width + at + d), m); });
    });
}

}  // namespace

struct GatedDeltaNetArgs {
  int64_t dtype, T, R, G, H, D, E, K;
  const void* x;
  int64_t ldx;
  const float *conv, *rate, *dt_bias, *norm;
  void* conv_state;
  float* state;
  int64_t slots;
  const int32_t *start, *slot;
  void* out;
  int64_t ldo, threads;
  double eps;
};
// 1: the tables do not fit each other.
OPERATOR(vc_gated_delta_net, GatedDeltaNetArgs) {
  const int32_t *start = a->start, *slot = a->slot;
  if (start[0] != 0 || start[a->R] > a->T) return 1;
  for (int64_t r = 0; r < a->R; r++)
    if (start[r + 1] < start[r] || slot[r] < 0 || slot[r] >= a->slots) return 1;
  const Shape dim{a->G, a->H, a->D, a->E, a->K};
  const Small small{a->conv, a->rate, a->dt_bias, a->norm, (float)a->eps};
  with_type(a->dtype, [&](auto t) {
    using T = decltype(t);
    auto clear = [&](int64_t first, int64_t end) {
      for (int64_t i = first; i < end; i++) std::memset((T*)a->out + i * a->ldo, 0, a->H * a->E * sizeof(T));
    };
    for_tasks((int)a->threads, a->R * a->G, [&](int64_t task) {
      int64_t r = task / a->G, g = task % a->G, rows = start[r + 1] - start[r];
      if (rows == 0) return;
      if (slot[r] == 0) {
        if (g == 0) clear(start[r], start[r + 1]);
        return;
      }
      head(dim, small, g, rows, (const T*)a->x + start[r] * a->ldx, a->ldx,
           (T*)a->conv_state + slot[r] * (a->K - 1) * dim.channels(), a->state + slot[r] * a->H * a->D * a->E,
           (T*)a->out + start[r] * a->ldo, a->ldo);
    });
    clear(start[a->R], a->T);
  });
  return 0;
}
