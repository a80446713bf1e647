// SPDX-License-Identifier: Apache-2.0
// Norms, activation, rotary embedding, and the write into the paged cache.
#include "common.h"

namespace {

constexpr int64_t GRAIN = 48 << 10;  // elements that are worth a thread: some 10 us of work

int64_t grain(int64_t row) { return 1 + GRAIN / (row + 1); }

struct NormArgs {
  int64_t dtype, weight_dtype, n0, n1, D;
  const void* x;
  int64_t x0, x1;
  void* residual;  // or null
  int64_t r0;
  const void* weight;
  void* out;
  int64_t o0, o1, threads;
  double eps;
};

// x [n0, n1, D] with strides; a weight of x's type is applied to the rounded value, a wider one before rounding.
template <class T, class W> void rms_norm(const NormArgs& a) {
  const W* weight = (const W*)a.weight;
  for_range((int)a.threads, a.n0 * a.n1, grain(a.D), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      int64_t i0 = i / a.n1, i1 = i % a.n1;
      const T* row = (const T*)a.x + i0 * a.x0 + i1 * a.x1;
      T* out = (T*)a.out + i0 * a.o0 + i1 * a.o1;
      vf squares = {};
      if (a.residual) {
        T* residual = (T*)a.residual + i * a.r0;
        for_columns(a.D, [&](int64_t d, int n) {
          vf v = round_to<T>(get(row + d, n) + get(residual + d, n));
          put(residual + d, v, n);
          squares = fma(v, v, squares);
        });
        row = residual;
      } else {
        for_columns(a.D, [&](int64_t d, int n) {
          vf v = get(row + d, n);
          squares = fma(v, v, squares);
        });
      }
      vf scale = splat(1.0f / std::sqrt(sum(squares) / (float)a.D + (float)a.eps));
      for_columns(a.D, [&](int64_t d, int n) {
        vf v = get(row + d, n) * scale;
        if constexpr (std::is_same_v<T, W>) v = round_to<T>(v);
        put(out + d, v * get(weight + d, n), n);
      });
    }
  });
}

// Strides in elements. `gates`: 1 where one number is the gate of a whole row [H, D], else as many as x has.
struct SigmoidArgs {
  int64_t dtype, T, H, D;
  void* x;
  int64_t x0, x1;
  const void* gate;
  int64_t g0, g1, one_gate, threads;
};
template <class T> void sigmoid_gate(const SigmoidArgs& a) {
  for_range((int)a.threads, a.T * a.H, grain(4 * a.D), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      T* x = (T*)a.x + i / a.H * a.x0 + i % a.H * a.x1;
      const T* gate = (const T*)a.gate + i / a.H * a.g0 + i % a.H * a.g1;
      vf one = splat(to_float(gate[0]));
      for_columns(a.D, [&](int64_t d, int n) {
        vf g = times_sigmoid(splat(1.0f), a.one_gate ? one : get(gate + d, n));
        put(x + d, get(x + d, n) * round_to<T>(g), n);
      });
    }
  });
}

struct GatedArgs { int64_t dtype, T, D; const void* x; int64_t ldx; void* out; int64_t ldo, threads; };
template <class F> void gated(const GatedArgs& a, F&& activation) {
  with_type(a.dtype, [&](auto t) {
    using T = decltype(t);
    for_range((int)a.threads, a.T, grain(4 * a.D), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        const T* x = (const T*)a.x + i * a.ldx;
        T* out = (T*)a.out + i * a.ldo;
        for_columns(a.D, [&](int64_t d, int n) {
          put(out + d, round_to<T>(activation(get(x + d, n))) * get(x + a.D + d, n), n);
        });
      }
    });
  });
}

template <class T>
void rotate(int64_t heads, int64_t stride, int64_t half, const float* cos_sin, T* x) {
  for (int64_t h = 0; h < heads; h++) {
    T *a = x + h * stride, *b = a + half;
    for_columns(half, [&](int64_t d, int n) {
      vf c = get(cos_sin + d, n), s = get(cos_sin + half + d, n), u = get(a + d, n), v = get(b + d, n);
      put(a + d, u * c - v * s, n);
      put(b + d, v * c + u * s, n);
    });
  }
}

// The same for elements that stand beside one another.
template <class T>
void rotate_pairs(int64_t heads, int64_t stride, int64_t half, const float* cos_sin, T* x) {
  for (int64_t h = 0; h < heads; h++)
    for_columns(half, [&](int64_t d, int n) {
      T a[VL] = {}, b[VL] = {}, *pair = x + h * stride + 2 * d;
      for (int i = 0; i < n; i++) a[i] = pair[2 * i], b[i] = pair[2 * i + 1];
      vf c = get(cos_sin + d, n), s = get(cos_sin + half + d, n), u = load(a), v = load(b);
      store(a, u * c - v * s);
      store(b, v * c + u * s);
      for (int i = 0; i < n; i++) pair[2 * i] = a[i], pair[2 * i + 1] = b[i];
    });
}

}  // namespace

OPERATOR(vc_rms_norm, NormArgs) {
  with_type(a->dtype, [&](auto t) {
    using T = decltype(t);
    if (a->weight_dtype == FP32) rms_norm<T, float>(*a);
    else rms_norm<T, T>(*a);
  });
  return 0;
}

OPERATOR(vc_silu_and_mul, GatedArgs) {
  gated(*a, [](vf g) { return silu(g); });
  return 0;
}
OPERATOR(vc_gelu_tanh_and_mul, GatedArgs) {
  gated(*a, [](vf g) { return gelu_tanh(g); });
  return 0;
}

OPERATOR(vc_sigmoid_gate, SigmoidArgs) {
  with_type(a->dtype, [&](auto t) { sigmoid_gate<decltype(t)>(*a); });
  return 0;
}

struct RotaryArgs {
  int64_t dtype, T, H, J, rot_dim, positions;
  const int64_t* position;
  void* q;
  int64_t q0, q1;
  void* k;
  int64_t k0, k1;
  const float* cos_sin;
  int64_t threads, interleaved;
};
OPERATOR(vc_rotary, RotaryArgs) {
  for (int64_t t = 0; t < a->T; t++)
    if (a->position[t] < 0 || a->position[t] >= a->positions) return 1;
  with_type(a->dtype, [&](auto type) {
    using T = decltype(type);
    for_range((int)a->threads, a->T, grain(4 * (a->H + a->J) * a->rot_dim), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++) {
        const float* cs = a->cos_sin + a->position[t] * a->rot_dim;
        auto turn = a->interleaved ? rotate_pairs<T> : rotate<T>;
        turn(a->H, a->q1, a->rot_dim / 2, cs, (T*)a->q + t * a->q0);
        turn(a->J, a->k1, a->rot_dim / 2, cs, (T*)a->k + t * a->k0);
      }
    });
  });
  return 0;
}

// Strides in bytes. v is null where the values are part of the keys. `codes`: rows of D numbers of `dtype` are divided by
// their scale and stored as e4m3; else their bytes are copied.
struct CacheArgs {
  int64_t T, J, D, row_bytes, dtype, codes, blocks, block_size;
  const char* k;
  int64_t k0, k1;
  const char* v;
  int64_t v0, v1;
  char* k_cache;
  int64_t kc0, kc1, kc2;
  char* v_cache;
  int64_t vc0, vc1, vc2;
  const int64_t* slots;
  int64_t threads;
  double k_scale, v_scale;
};
void store_row(const CacheArgs& a, const char* from, char* to, float scale) {
  if (!a.codes) {
    std::memcpy(to, from, a.row_bytes);
    return;
  }
  with_type(a.dtype, [&](auto type) {
    auto* x = (const decltype(type)*)from;
    auto* y = (e4m3*)to;
    int64_t d = 0;
    for (; d + VL <= a.D; d += VL) store(y + d, load(x + d) / scale);
    if (d < a.D) store_part(y + d, load_part(x + d, (int)(a.D - d)) / scale, (int)(a.D - d));
  });
}
OPERATOR(vc_reshape_and_cache, CacheArgs) {
  for (int64_t t = 0; t < a->T; t++)
    if (a->slots[t] < -1 || a->slots[t] >= a->blocks * a->block_size) return 1;
  for_range((int)a->threads, a->T, 1 + (64 << 10) / (a->J * a->row_bytes), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      if (a->slots[t] < 0) continue;
      int64_t block = a->slots[t] / a->block_size, at = a->slots[t] % a->block_size;
      for (int64_t h = 0; h < a->J; h++) {
        char* k = a->k_cache + block * a->kc0 + h * a->kc1 + at * a->kc2;
        store_row(*a, a->k + t * a->k0 + h * a->k1, k, (float)a->k_scale);
        if (!a->v) continue;
        char* v = a->v_cache + block * a->vc0 + h * a->vc1 + at * a->vc2;
        store_row(*a, a->v + t * a->v0 + h * a->v1, v, (float)a->v_scale);
      }
    }
  });
  return 0;
}

struct PaddingArgs { int64_t T, row_bytes; char* x; int64_t x0; const int64_t* slots; };
OPERATOR(vc_zero_padding_rows, PaddingArgs) {
  for (int64_t t = 0; t < a->T; t++)
    if (a->slots[t] < 0) std::memset(a->x + t * a->x0, 0, a->row_bytes);
  return 0;
}
