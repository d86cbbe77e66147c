// The parts of a Llama decoder layer that are not matmuls, over token rows, for AVX512-BF16.
//
// Keys are kept in blocks of 16 positions, [block][dim / 2][16][2], and values in pairs of
// positions, [pair][dim][2]: one dot-product instruction then needs neither a shuffle nor a
// horizontal sum. HEAD_DIM and GROUP (query heads per kv head) are given by the compiler.
#include <immintrin.h>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

using bf16 = uint16_t;
constexpr int kPairs = HEAD_DIM / 2;
constexpr int kChunks = HEAD_DIM / 16;
constexpr int kHalf = HEAD_DIM / 2;

inline float widen(bf16 x) {
  uint32_t bits = uint32_t(x) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline bf16 narrow(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bf16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

inline uint32_t pair_at(const bf16* x) {
  uint32_t bits;
  std::memcpy(&bits, x, 4);
  return bits;
}

void rotate(bf16* head, const float* cosine, const float* sine) {
  for (int i = 0; i < kHalf; ++i) {
    float a = widen(head[i]), b = widen(head[i + kHalf]);
    head[i] = narrow(a * cosine[i] - b * sine[i]);
    head[i + kHalf] = narrow(b * cosine[i] + a * sine[i]);
  }
}

void store_key(bf16* keys, const bf16* head, int position) {
  bf16* block = keys + size_t(position / 16) * 16 * HEAD_DIM + (position % 16) * 2;
  for (int p = 0; p < kPairs; ++p) std::memcpy(block + p * 32, head + 2 * p, 4);
}

void store_value(bf16* values, const bf16* head, int position) {
  bf16* pair = values + size_t(position / 2) * 2 * HEAD_DIM + position % 2;
  for (int d = 0; d < HEAD_DIM; ++d) pair[2 * d] = head[d];
}

void softmax_to_bf16(const float* scores, bf16* out, int length, int padded) {
  float top = -INFINITY, sum = 0;
  for (int i = 0; i < length; ++i) top = scores[i] > top ? scores[i] : top;
  static thread_local std::vector<float> weights;
  weights.resize(padded);
  float* w = weights.data();
#pragma omp simd reduction(+ : sum)
  for (int i = 0; i < length; ++i) {
    w[i] = expf(scores[i] - top);
    sum += w[i];
  }
  const float scale = 1.0f / sum;
  for (int i = 0; i < length; ++i) out[i] = narrow(w[i] * scale);
  for (int i = length; i < padded; ++i) out[i] = 0;
}

void attend_one(const bf16* query, const bf16* keys, const bf16* values, int length, bf16* out) {
  const int padded = (length + 15) / 16 * 16;
  static thread_local std::vector<float> scores;
  static thread_local std::vector<bf16> probs;
  scores.resize(size_t(GROUP) * padded);
  probs.resize(size_t(GROUP) * padded);
  const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(float(HEAD_DIM)));
  for (int base = 0; base < length; base += 16) {
    const bf16* block = keys + size_t(base) * HEAD_DIM;
    __m512 sum[GROUP][2];
    for (int g = 0; g < GROUP; ++g) sum[g][0] = sum[g][1] = _mm512_setzero_ps();
    for (int p = 0; p < kPairs; ++p) {
      const __m512bh key = (__m512bh)_mm512_loadu_si512(block + p * 32);
      for (int g = 0; g < GROUP; ++g) {
        const __m512bh q = (__m512bh)_mm512_set1_epi32(pair_at(query + g * HEAD_DIM + 2 * p));
        sum[g][p & 1] = _mm512_dpbf16_ps(sum[g][p & 1], key, q);
      }
    }
    for (int g = 0; g < GROUP; ++g) {
      const __m512 dot = _mm512_mul_ps(_mm512_add_ps(sum[g][0], sum[g][1]), scale);
      _mm512_storeu_ps(scores.data() + size_t(g) * padded + base, dot);
    }
  }
  for (int g = 0; g < GROUP; ++g)
    softmax_to_bf16(scores.data() + size_t(g) * padded, probs.data() + size_t(g) * padded, length,
                    padded);
  __m512 acc[GROUP][kChunks];
  for (int g = 0; g < GROUP; ++g)
    for (int c = 0; c < kChunks; ++c) acc[g][c] = _mm512_setzero_ps();
  for (int t = 0; t < length; t += 2) {
    const bf16* pair = values + size_t(t) * HEAD_DIM;
    for (int c = 0; c < kChunks; ++c) {
      const __m512bh value = (__m512bh)_mm512_loadu_si512(pair + c * 32);
      for (int g = 0; g < GROUP; ++g) {
        const __m512bh p =
            (__m512bh)_mm512_set1_epi32(pair_at(probs.data() + size_t(g) * padded + t));
        acc[g][c] = _mm512_dpbf16_ps(acc[g][c], value, p);
      }
    }
  }
  for (int g = 0; g < GROUP; ++g)
    for (int c = 0; c < kChunks; ++c)
      _mm256_storeu_si256((__m256i*)(out + g * HEAD_DIM + c * 16),
                          (__m256i)_mm512_cvtneps_pbh(acc[g][c]));
}

}  // namespace

extern "C" {

// Rotates q and k in place, stores k and v, then attends every row to its own slot up to itself.
// qkv [rows, (GROUP + 2) * kv_heads * HEAD_DIM]; cosine, sine [capacity, HEAD_DIM / 2];
// keys, values [slots, kv_heads, capacity * HEAD_DIM]; out [rows, GROUP * kv_heads * HEAD_DIM].
void attend(bf16* qkv, const float* cosine, const float* sine, bf16* keys, bf16* values,
            const int64_t* slot, const int64_t* position, int64_t rows, int64_t kv_heads,
            int64_t capacity, bf16* out) {
  const int64_t heads = GROUP * kv_heads, width = (heads + 2 * kv_heads) * HEAD_DIM;
  for (int64_t n = 0; n < rows; ++n) {
    const float* c = cosine + position[n] * kHalf;
    const float* s = sine + position[n] * kHalf;
    bf16* row = qkv + n * width;
    for (int64_t h = 0; h < heads + kv_heads; ++h) rotate(row + h * HEAD_DIM, c, s);
    for (int64_t h = 0; h < kv_heads; ++h) {
      const size_t at = size_t(slot[n] * kv_heads + h) * capacity * HEAD_DIM;
      store_key(keys + at, row + (heads + h) * HEAD_DIM, position[n]);
      store_value(values + at, row + (heads + kv_heads + h) * HEAD_DIM, position[n]);
    }
  }
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t h = 0; h < kv_heads; ++h) {
      const size_t at = size_t(slot[n] * kv_heads + h) * capacity * HEAD_DIM;
      attend_one(qkv + n * width + h * GROUP * HEAD_DIM, keys + at, values + at,
                 int(position[n]) + 1, out + (n * heads + h * GROUP) * HEAD_DIM);
    }
}

// residual += delta (skipped when delta is null); out = rmsnorm(residual) * weight.
void add_norm(bf16* residual, const bf16* delta, const bf16* weight, float eps, int64_t rows,
              int64_t width, bf16* out) {
  for (int64_t n = 0; n < rows; ++n) {
    bf16* x = residual + n * width;
    if (delta) {
      const bf16* d = delta + n * width;
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) x[i] = narrow(widen(x[i]) + widen(d[i]));
    }
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; ++i) sum += widen(x[i]) * widen(x[i]);
    const float scale = 1.0f / std::sqrt(sum / width + eps);
    bf16* y = out + n * width;
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) y[i] = narrow(widen(narrow(widen(x[i]) * scale)) * widen(weight[i]));
  }
}

// gate_up [rows, 2 * width] -> out [rows, width] = silu(gate) * up.
void silu_mul(const bf16* gate_up, int64_t rows, int64_t width, bf16* out) {
  for (int64_t n = 0; n < rows; ++n) {
    const bf16* gate = gate_up + n * 2 * width;
    const bf16* up = gate + width;
    bf16* y = out + n * width;
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) {
      const float g = widen(gate[i]);
      y[i] = narrow(g / (1.0f + expf(-g)) * widen(up[i]));
    }
  }
}

// best[n] = first index of the largest of logits [rows, width].
void argmax(const bf16* logits, int64_t rows, int64_t width, int64_t* best) {
  for (int64_t n = 0; n < rows; ++n) {
    const bf16* x = logits + n * width;
    float top = -INFINITY;
#pragma omp simd reduction(max : top)
    for (int64_t i = 0; i < width; ++i) top = widen(x[i]) > top ? widen(x[i]) : top;
    int64_t i = 0;
    while (i + 1 < width && widen(x[i]) != top) ++i;
    best[n] = i;
  }
}
}
