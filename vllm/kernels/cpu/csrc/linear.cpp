// SPDX-License-Identifier: Apache-2.0
// Linear layers over packed weights, embedding rows out of them, and SwiGLU experts.
#include "amx.h"
#include "quantized.h"

namespace {

constexpr int64_t A_BYTES = 384 << 10;  // fp32 rows of one block: they share the L2 cache with a weight panel
thread_local Scratch a_scratch, c_scratch, gate_scratch, pair_scratch, row_scratch;

int64_t block_rows(int64_t M, int64_t K) {
  int64_t most = A_BYTES / (K * 4) / MR_MAX * MR_MAX;
  most = most < 2 * MR_MAX ? 2 * MR_MAX : most > 8 * MR_MAX ? 8 * MR_MAX : most;
  int64_t blocks = (M + most - 1) / most;
  return (M + blocks - 1) / blocks;
}

template <class W> constexpr int64_t weight_k(int64_t K) { return padded_k<W>(K, 32); }

INLINE bool switched_off(const char* name) {
  const char* wish = std::getenv(name);
  return wish && wish[0] == '0';
}
// 0 the vector kernels run, 1 the matrix unit runs bfloat16, 2 it failed its test and the vector kernels run.
int matrix_unit() {
#if HAS_AMX
  static const int state = switched_off("VLLM_CPU_AMX") || !amx_allowed() ? 0 : amx_works() ? 1 : 2;
  return state;
#endif
  return 0;
}
// Whether the vector kernels multiply pairs of bfloat16.
bool pair_products() {
#if HAS_BF16_DOT
  static const bool state = matrix_unit() != 1 && !switched_off("VLLM_CPU_BF16_PAIRS");
  return state;
#endif
  return false;
}
template <class T> bool takes_raw() {
  return std::is_same_v<T, float> || (std::is_same_v<T, bf16> && (matrix_unit() == 1 || pair_products()));
}

// Rows of A as the kernels want them: bfloat16 as it is where it is multiplied so, else fp32; zero from K up to weight_k.
struct Rows {
  const void* data;
  int64_t ld;
};

// In place if they can be read so, else in the thread's scratch. `row(i)` points at row i, `ld` is their distance.
template <class T, class Row> Rows take_rows(int64_t rows, int64_t K, int64_t ld, bool in_place, Row&& row) {
  const bool raw = takes_raw<T>();
  const int64_t padded = weight_k<T>(K);
  if (raw && in_place && padded == K) return {row(0), ld};
  ld = (padded + 31) / 32 * 32 + 16;  // never a multiple of the page size: rows fall into different cache sets
  if (!raw) {
    float* a = a_scratch.get<float>(rows * ld);
    for (int64_t i = 0; i < rows; i++) widen_row(row(i), K, padded, a + i * ld);
    return {a, ld};
  }
  T* a = a_scratch.get<T>(rows * ld);
  for (int64_t i = 0; i < rows; i++) {
    std::memcpy(a + i * ld, row(i), K * sizeof(T));
    std::memset((void*)(a + i * ld + K), 0, (padded - K) * sizeof(T));
  }
  return {a, ld};
}

template <class T, class O> INLINE void store_row(O* out, const float* c, const T* bias, int64_t n) {
  int64_t j = 0;
  for (; j + VL <= n; j += VL) {
    vf v = load(c + j);
    if (bias) v += load(bias + j);
    store(out + j, v);
  }
  if (j < n) {
    vf v = load(c + j);  // C has whole panels
    if (bias) v += load_part(bias + j, (int)(n - j));
    store_part(out + j, v, (int)(n - j));
  }
}

// All tiles of rows [0, rows) x panels [p0, p1): done(first row, rows, first panel, panels, c, ldc).
template <class W, class Done>
void gemm_block(int64_t rows, Rows a, int64_t K, const W* w, int64_t p0, int64_t p1, Done&& done) {
  const int64_t Kp = weight_k<W>(K), panel = Kp * NR;
  float* c = c_scratch.get<float>(AMX_ROWS * NR + MR_MAX * NP_MAX * NR);
#if HAS_AMX
  if constexpr (std::is_same_v<W, bf16>)
    if (matrix_unit() == 1) {
      // tiles of one height, for the unit to keep its configuration; the last may overlap the one before
      int64_t tiles = (rows + AMX_ROWS - 1) / AMX_ROWS, height = (rows + tiles - 1) / tiles;
      amx_begin((int)height);
      for (int64_t p = p0; p < p1; p++)
        for (int64_t i = 0; i < tiles; i++) {
          int64_t r0 = i * height < rows - height ? i * height : rows - height;
          amx_tile((int)height, Kp, (const bf16*)a.data + r0 * a.ld, a.ld, w + p * panel, c);
          done(r0, (int)height, p, 1, c, (int64_t)NR);
        }
      amx_end();
      return;
    }
#endif
  auto tiles_of = [&](const auto* rows_of_a) {
    int64_t tiles = (rows + MR_MAX - 1) / MR_MAX;
    int group = panels_of_tile((int)((rows + tiles - 1) / tiles));
    for (int64_t p = p0; p < p1; p += group) {
      int np = (int)(p1 - p < group ? p1 - p : group);
      for_tiles(rows, [&](int64_t r0, int mr) {
        tile(mr, np, Kp, rows_of_a + r0 * a.ld, a.ld, w + p * panel, panel, c, (int64_t)np * NR, false);
        done(r0, mr, p, np, c, (int64_t)np * NR);
      });
    }
  };
#if HAS_BF16_DOT
  if constexpr (std::is_same_v<W, bf16>)
    if (pair_products()) return tiles_of((const bf16*)a.data);
#endif
  tiles_of((const float*)a.data);
}

// Weights that linear layers and experts multiply with: take() makes Rows of inputs, gemm() multiplies them with panels.
template <class T> struct DenseWeight {
  int64_t K;
  const T* w;
  int64_t block(int64_t M) const { return block_rows(M, K); }  // rows to take at a time
  template <class Row> Rows take(int64_t rows, int64_t ld, bool in_place, Row&& row) const {
    return take_rows<T>(rows, K, ld, in_place, row);
  }
  template <class Done> void gemm(int64_t rows, Rows a, int64_t p0, int64_t p1, Done&& done) const {
    gemm_block(rows, a, K, w, p0, p1, done);
  }
  DenseWeight at(int64_t panel, int64_t) const { return {K, w + panel * weight_k<T>(K) * NR}; }
};

template <class T> struct QuantizedWeight {
  Quantized q;

  int64_t block(int64_t M) const { return block_rows(M, q.integer ? IntegerRow::bytes(q) / 4 : 1); }
  template <class Row> Rows take(int64_t rows, int64_t ld, bool in_place, Row&& row) const {
    if (std::is_same_v<T, float> && in_place && !q.integer && !q.order && !q.activations) return {row(0), ld};
    const int64_t K = q.K, padded = q.padded(), bytes = q.integer ? IntegerRow::bytes(q) : padded * 4;
    ld = (bytes + 63) / 64 * 64 + 64;
    char* a = a_scratch.get<char>(rows * ld);
    float* wide = row_scratch.get<float>(padded);
    for (int64_t i = 0; i < rows; i++) {
      const T* x = row(i);
      float* to = q.integer ? wide : (float*)(a + i * ld);
      if (!q.order) {
        widen_row(x, K, padded, to);
      } else {
        for (int64_t k = 0; k < K; k++) to[k] = to_float(x[q.order[k]]);
        std::fill(to + K, to + padded, 0.0f);
      }
      if (q.activations == TO_FP8 || (q.activations && !q.integer)) round_row(q, to);
      if (q.integer) round_to_int8(q, wide, a + i * ld);
    }
    return {a, q.integer ? ld : ld / 4};
  }

  template <class Done> void gemm(int64_t rows, Rows a, int64_t p0, int64_t p1, Done&& done) const {
    const int64_t tiles = q.integer ? (rows + DOT_ROWS - 1) / DOT_ROWS : 1, highest = (rows + tiles - 1) / tiles;
    const int64_t group = q.integer ? dot_panels((int)highest, (int)q.step_bytes()) : MOST_PANELS;
    float* c = c_scratch.get<float>(highest * MOST_PANELS * NR);
    for (int64_t p = p0; p < p1; p += group) {
      const int np = (int)(p1 - p < group ? p1 - p : group);
      const uint8_t* panel = q.data + p * q.panel();
      for (int64_t i = 0; i < tiles; i++) {
        int64_t r0 = rows * i / tiles;
        int mr = (int)(rows * (i + 1) / tiles - r0);
        if (q.integer) dot_tile(q, mr, np, panel, (const char*)a.data + r0 * a.ld, a.ld, c);
        else wide_tiles(q, mr, np, panel, (const float*)a.data + r0 * a.ld, a.ld, c);
        done(r0, mr, p, np, c, (int64_t)np * NR);
      }
    }
  }

  QuantizedWeight at(int64_t panel, int64_t expert) const {
    QuantizedWeight other = *this;
    other.q.data += panel * q.panel();
    if (q.order) other.q.order += expert * q.K;
    return other;
  }
};

template <class T, class O, class W>
void linear(int64_t M, int64_t N, int64_t K, const T* x, int64_t ldx, const W& w, const T* bias, O* out, int64_t ldo,
            int threads) {
  int64_t panels = (N + NR - 1) / NR;
  int64_t mc = w.block(M), m_blocks = (M + mc - 1) / mc;
  int64_t used = 1 + M * N * K / (64 << 10);
  threads = (int)(used < threads ? used : threads);
  // tasks in an order that keeps a thread on one block of rows; chunks are multiples of the largest panel group
  int64_t chunks = threads == 1 ? 1 : (threads * 4 + m_blocks - 1) / m_blocks;
  int64_t chunk = ((panels + chunks - 1) / chunks + NP_MAX - 1) / NP_MAX * NP_MAX;
  chunks = (panels + chunk - 1) / chunk;
  std::atomic<int64_t> next{0};
  on_threads(threads, [&] {
    int64_t have = -1;
    Rows a{};
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < m_blocks * chunks;) {
      int64_t block = i / chunks, m0 = block * mc, rows = M - m0 < mc ? M - m0 : mc;
      if (block != have) {
        a = w.take(rows, ldx, true, [&](int64_t r) { return x + (m0 + r) * ldx; });
        have = block;
      }
      int64_t p0 = i % chunks * chunk, p1 = p0 + chunk < panels ? p0 + chunk : panels;
      w.gemm(rows, a, p0, p1, [&](int64_t r0, int mr, int64_t p, int np, const float* c, int64_t ldc) {
        int64_t n0 = p * NR, n = N - n0 < np * NR ? N - n0 : np * NR;
        for (int r = 0; r < mr; r++)
          store_row(out + (m0 + r0 + r) * ldo + n0, c + r * ldc, bias ? bias + n0 : nullptr, n);
      });
    }
  });
}

template <class T> void pack(int64_t N, int64_t K, const T* w, int64_t ldw, T* out, int threads) {
  int64_t Kp = weight_k<T>(K);
  constexpr int pair = std::is_same_v<T, bf16> ? 2 : 1;
  for_range(threads, (N + NR - 1) / NR, 4, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; p++) {
      T* o = out + p * Kp * NR;
      for (int64_t k = 0; k < Kp; k++)
        for (int j = 0; j < NR; j++) {
          int64_t n = p * NR + j;
          o[(k / pair * NR + j) * pair + k % pair] = n < N && k < K ? w[n * ldw + k] : T{};
        }
    }
  });
}

template <class T> void unpack_row(int64_t K, const T* w, int64_t n, T* out) {
  constexpr int pair = std::is_same_v<T, bf16> ? 2 : 1;
  const T* p = w + n / NR * weight_k<T>(K) * NR;
  int j = (int)(n % NR);
  for (int64_t k = 0; k < K; k++) out[k] = p[(k / pair * NR + j) * pair + k % pair];
}

struct ExpertsArgs {
  int64_t dtype, wide_ids, T, S, E, I, D;
  const void* x;
  int64_t ldx;
  const void *w13, *w2, *ids;  // quantised: w13 and w2 point at their Quantized
  const float* weights;
  void* out;
  int64_t ldo, threads;
  const float *b13, *b2;  // [E][gate, up], [E][D], or null
  int64_t clamped;        // gpt-oss's activation
};

// gate * sigmoid(1.702 gate) * (up + 1), gate at most 7, up within 7 of 0 (gpt-oss). A NaN stays one.
INLINE vf clamped_gate(vf gate, vf up) {
  gate = gate > splat(7.0f) ? splat(7.0f) : gate;
  up = up > splat(7.0f) ? splat(7.0f) : up;
  up = up < splat(-7.0f) ? splat(-7.0f) : up;
  vf x = gate * 1.702f;
  return silu(x) * (1 / 1.702f) * (up + 1.0f);
}

// A register of a bias of which `some` more elements exist.
INLINE vf bias_at(const float* bias, int64_t some) {
  return some >= VL ? load(bias) : some > 0 ? load_part(bias, (int)some) : vf{};
}

// w13: [E][gate panels, up panels], w2: [E][panels]. See fused_experts in Python.
template <class T, class W> int experts(const ExpertsArgs& args, const W& w13, const W& w2) {
  const int64_t tokens = args.T, slots = args.S, E = args.E, I = args.I, D = args.D, ldx = args.ldx;
  const T* x = (const T*)args.x;
  auto id_at = [&](int64_t i) { return args.wide_ids ? ((const int64_t*)args.ids)[i] : (int64_t)((const int32_t*)args.ids)[i]; };
  for (int64_t i = 0; i < tokens * slots; i++)
    if (id_at(i) < -1 || id_at(i) >= E) return 1;
  int64_t i_panels = (I + NR - 1) / NR, d_panels = (D + NR - 1) / NR;
  int64_t ldh = i_panels * NR, ldy = d_panels * NR;

  // Few enough tokens at a time that the intermediate values stay below 64 MB.
  int64_t step = (64 << 20) / (slots * (ldh * (int64_t)sizeof(T) + ldy * 4) + 1);
  step = step < 1 ? 1 : step;
  for (int64_t t0 = 0; t0 < tokens; t0 += step) {
    int64_t nt = tokens - t0 < step ? tokens - t0 : step, n = nt * slots;
    const float* wt = args.weights + t0 * slots;
    int64_t index_bytes = ((2 * n + 2 * (E + 1)) * 8 + 63) / 64 * 64, h_bytes = (n * ldh * sizeof(T) + 63) / 64 * 64;
    char* mem = pair_scratch.get<char>(index_bytes + h_bytes + n * ldy * 4);
    int64_t* order = (int64_t*)mem;    // sorted position -> (token, slot)
    int64_t* place = order + n;        // (token, slot) -> sorted position, or -1
    int64_t* first = place + n;        // first sorted position of an expert
    int64_t* cursor = first + E + 1;
    T* h = (T*)(mem + index_bytes);
    float* y = (float*)(mem + index_bytes + h_bytes);

    std::memset(first, 0, (E + 1) * 8);
    for (int64_t i = 0; i < n; i++)
      if (int64_t id = id_at(t0 * slots + i); id >= 0) first[id + 1]++;
    for (int64_t e = 0; e < E; e++) first[e + 1] += first[e];
    std::memcpy(cursor, first, (E + 1) * 8);
    for (int64_t i = 0; i < n; i++) {
      int64_t id = id_at(t0 * slots + i);
      place[i] = id < 0 ? -1 : cursor[id]++;
      if (place[i] >= 0) order[place[i]] = i;
    }

    int64_t work = first[E] * I * D;
    int used = work < (64 << 10) ? 1 : (int)args.threads;
    // fn(expert, first sorted position, rows, first panel, last panel) over all experts that have tokens
    auto blocks = [&](const W& w, int64_t panels, auto&& fn) {
      int64_t mc = w.block(8 * MR_MAX), chunks = used == 1 ? 1 : (panels + NP_MAX - 1) / NP_MAX;
      chunks = chunks > 4 * used ? 4 * used : chunks;
      int64_t chunk = (panels + chunks - 1) / chunks;
      for_tasks(used, E * chunks, [&](int64_t task) {
        int64_t e = task / chunks, p0 = task % chunks * chunk, p1 = p0 + chunk < panels ? p0 + chunk : panels;
        for (int64_t s = first[e]; s < first[e + 1] && p0 < p1; s += mc)
          fn(e, s, first[e + 1] - s < mc ? first[e + 1] - s : mc, p0, p1);
      });
    };

    blocks(w13, i_panels, [&](int64_t e, int64_t s, int64_t rows, int64_t p0, int64_t p1) {
      const W gates = w13.at(e * 2 * i_panels, e), ups = gates.at(i_panels, 0);
      Rows a = gates.take(rows, 0, false, [&](int64_t r) { return x + (t0 + order[s + r] / slots) * ldx; });
      float* gate = gate_scratch.get<float>(rows * NR);
      for (int64_t p = p0; p < p1; p++) {
        gates.gemm(rows, a, p, p + 1, [&](int64_t r0, int mr, int64_t, int, const float* c, int64_t) {
          std::memcpy(gate + r0 * NR, c, mr * NR * 4);
        });
        ups.gemm(rows, a, p, p + 1, [&](int64_t r0, int mr, int64_t, int, const float* c, int64_t) {
          for (int64_t i = 0; i < mr * NR; i += VL) {
            vf g = load(gate + r0 * NR + i), u = load(c + i);
            if (args.b13) {
              const float* bias = args.b13 + e * 2 * I;
              int64_t n = p * NR + i % NR, some = I - n;
              g += bias_at(bias + n, some);
              u += bias_at(bias + I + n, some);
            }
            g = round_to<T>(g), u = round_to<T>(u);
            vf y = args.clamped ? clamped_gate(g, u) : round_to<T>(silu(g)) * u;
            store(h + (s + r0 + i / NR) * ldh + p * NR + i % NR, y);
          }
        });
      }
    });
    blocks(w2, d_panels, [&](int64_t e, int64_t s, int64_t rows, int64_t p0, int64_t p1) {
      const W down = w2.at(e * d_panels, e);
      Rows a = down.take(rows, ldh, true, [&](int64_t r) { return h + (s + r) * ldh; });
      down.gemm(rows, a, p0, p1, [&](int64_t r0, int mr, int64_t p, int np, const float* c, int64_t ldc) {
        for (int r = 0; r < mr; r++) {
          vf scale = splat(wt[order[s + r0 + r]]);
          float* to = y + (s + r0 + r) * ldy + p * NR;
          for (int64_t j = 0; j < np * NR; j += VL) {
            vf sum = load(c + r * ldc + j);
            if (args.b2) sum += bias_at(args.b2 + e * D + p * NR + j, D - p * NR - j);
            store(to + j, sum * scale);
          }
        }
      });
    });
    for_range(used, nt, 1 + (32 << 10) / (slots * D), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++)
        for (int64_t d = 0; d < D; d += VL) {
          vf total = {};
          for (int64_t k = 0; k < slots; k++)
            if (int64_t at = place[t * slots + k]; at >= 0) total += load(y + at * ldy + d);
          T* to = (T*)args.out + (t0 + t) * args.ldo + d;
          if (D - d >= VL) store(to, total);
          else store_part(to, total, (int)(D - d));
        }
    });
  }
  return 0;
}

}  // namespace

OPERATOR(vc_panel_width, void) { return NR; }
OPERATOR(vc_matrix_unit, void) { return matrix_unit(); }
EXPORT void vc_poison_scratch(uint32_t word) { scratch_poison = word; }

struct PackArgs { int64_t dtype, N, K; const void* w; int64_t ldw; void* out; int64_t threads; };
OPERATOR(vc_pack, PackArgs) {
  with_type(a->dtype, [&](auto t) {
    using T = decltype(t);
    pack(a->N, a->K, (const T*)a->w, a->ldw, (T*)a->out, (int)a->threads);
  });
  return 0;
}

struct LinearArgs {
  int64_t dtype, out_dtype, T, N, K;
  const void* x;
  int64_t ldx;
  const void *w, *bias;
  void* out;
  int64_t ldo, threads;
};
template <class T, class W> void run_linear(const LinearArgs& a, const W& w) {
  auto run = [&](auto* out) {
    linear(a.T, a.N, a.K, (const T*)a.x, a.ldx, w, (const T*)a.bias, out, a.ldo, (int)a.threads);
  };
  if (a.out_dtype == FP32) run((float*)a.out);
  else run((T*)a.out);
}
OPERATOR(vc_linear, LinearArgs) {
  with_type(a->dtype, [&](auto t) {
    using T = decltype(t);
    run_linear<T>(*a, DenseWeight<T>{a->K, (const T*)a->w});
  });
  return 0;
}
OPERATOR(vc_quantized_linear, LinearArgs) {
  with_type(a->dtype, [&](auto t) {
    using T = decltype(t);
    run_linear<T>(*a, QuantizedWeight<T>{*(const Quantized*)a->w});
  });
  return 0;
}

// The rows are those of the ids [first, first + N); `shared`: that of another id is 0, on one of the other ranks it is not.
struct EmbeddingArgs {
  int64_t dtype, T, N, K;
  const int64_t* ids;
  const void* w;
  void* out;
  int64_t threads, first, shared;
};
OPERATOR(vc_embedding, EmbeddingArgs) {
  for (int64_t i = 0; i < a->T && !a->shared; i++)
    if (a->ids[i] < 0 || a->ids[i] >= a->N) return 1;
  with_type(a->dtype, [&](auto t) {
    using T = decltype(t);
    for_range((int)a->threads, a->T, 1 + (8 << 10) / a->K, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        int64_t row = a->ids[i] - a->first;
        T* out = (T*)a->out + i * a->K;
        if (row < 0 || row >= a->N) std::memset(out, 0, a->K * sizeof(T));
        else unpack_row(a->K, (const T*)a->w, row, out);
      }
    });
  });
  return 0;
}

OPERATOR(vc_fused_experts, ExpertsArgs) {
  int64_t rc = 0;
  with_type(a->dtype, [&](auto t) {
    using T = decltype(t);
    rc = experts<T>(*a, DenseWeight<T>{a->D, (const T*)a->w13}, DenseWeight<T>{a->I, (const T*)a->w2});
  });
  return rc;
}
OPERATOR(vc_quantized_experts, ExpertsArgs) {
  int64_t rc = 0;
  with_type(a->dtype, [&](auto t) {
    using W = QuantizedWeight<decltype(t)>;
    rc = experts<decltype(t)>(*a, W{*(const Quantized*)a->w13}, W{*(const Quantized*)a->w2});
  });
  return rc;
}
