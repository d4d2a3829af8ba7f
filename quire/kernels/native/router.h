// moe_router: scores of all experts, the choice of a few, and their weights, all in float32.
// A score is one sum in one order, so a row's choice does not depend on the rows beside it.
#pragma once
#include "lora.h"

struct RouterArgs {
  const char* x;
  long x_row;               // bytes
  const char* weight;       // [experts, inputs]
  const void* bias;         // [experts] or null
  const float* correction;  // the same: added for the choice only
  int32_t* ids;             // [rows, top]
  float* weights;
  long rows, inputs, experts, top, sigmoid, renormalise, groups, top_groups, top2, dtype;
  double scale;

  long logits_bytes() const { return (rows * experts * 4 + 63) / 64 * 64; }
  long row_bytes() const { return (experts * 12 + 63) / 64 * 64; }  // of a thread
};

inline Plan plan(const RouterArgs& a, int threads) {
  return {a.rows * a.experts * a.inputs > 65536, a.logits_bytes() + threads * a.row_bytes()};
}

// Take the largest of n numbers that are not taken: the first of equals. NaN is the largest.
INLINE long take_largest(const float* v, bool* taken, long n) {
  long best = -1;
  for (long i = 0; i < n; i++)
    if (!taken[i] && (best < 0 || v[i] > v[best] || (v[i] != v[i] && v[best] == v[best]))) best = i;
  taken[best] = true;
  return best;
}

// Scores outside of the best groups become -inf. group: memory of a number for each group.
inline void mask_groups(const RouterArgs& a, float* ranked, float* group, bool* taken) {
  const long size = a.experts / a.groups;
  for (long g = 0; g < a.groups; g++) {
    float* v = ranked + g * size;
    memset(taken, 0, size);
    group[g] = v[take_largest(v, taken, size)];
    if (a.top2) group[g] += v[take_largest(v, taken, size)];
  }
  memset(taken, 0, a.groups);
  for (long i = 0; i < a.top_groups; i++) take_largest(group, taken, a.groups);
  for (long i = 0; i < a.experts; i++)
    if (!taken[i / size]) ranked[i] = -INFINITY;
}

// The choice of row t. logits: become scores. memory: row_bytes.
template <class T>
void choose_experts(const RouterArgs& a, long t, float* logits, float* memory) {
  const long n = a.experts;
  float *ranked = memory, *group = memory + n, most = -INFINITY, total = 0;
  bool* taken = (bool*)(memory + 2 * n);
  if (a.bias)
    each(n, [&](long i, long k) { put(logits + i, get(logits + i, k) + get((const T*)a.bias + i, k), k); });
  for (long i = 0; i < n; i++) most = logits[i] > most ? logits[i] : most;
  if (a.sigmoid)
    each(n, [&](long i, long k) { put(logits + i, 1.0f / (1.0f + vexp(-get(logits + i, k))), k); });
  else
    each(n, [&](long i, long k) { put(logits + i, vexp(get(logits + i, k) - most), k); });
  for (long i = 0; i < n; i++) total += logits[i];
  for (long i = 0; i < n; i++) {
    if (!a.sigmoid) logits[i] /= total;
    ranked[i] = a.correction ? logits[i] + a.correction[i] : logits[i];
  }
  if (a.groups > 1) mask_groups(a, ranked, group, taken);
  memset(taken, 0, n);
  int32_t* ids = a.ids + t * a.top;
  float *weights = a.weights + t * a.top, sum = 0;
  for (long k = 0; k < a.top; k++) {
    ids[k] = (int32_t)take_largest(ranked, taken, n);
    weights[k] = logits[ids[k]];
    sum += weights[k];
  }
  for (long k = 0; k < a.top; k++)
    weights[k] = (a.renormalise ? weights[k] / sum : weights[k]) * (float)a.scale;
}

template <class T>
void route(const RouterArgs& a, const Team& team) {
  float* logits = (float*)team.scratch;
  const long bytes = a.inputs * (long)sizeof(T);
  for (long e; (e = team.take(RANKS)) < a.experts;) {
    const int count = (int)(a.experts - e < RANKS ? a.experts - e : RANKS);
    in_tiles(a.rows, [&](auto tall, long t) {
      constexpr int MR = decltype(tall)::value;
      const char* x[MR];
      float* out[MR];
      for (int i = 0; i < MR; i++) {
        x[i] = a.x + (t + i) * a.x_row;
        out[i] = logits + (t + i) * a.experts + e;
      }
      shrink<T, MR>(x, a.weight + e * bytes, bytes, count, bytes, out);
    });
  }
  team.barrier();
  float* memory = (float*)(team.scratch + a.logits_bytes() + team.rank * a.row_bytes());
  long from, to;
  team.share(a.rows, from, to);
  for (long t = from; t < to; t++) choose_experts<T>(a, t, logits + t * a.experts, memory);
}

inline void run(const RouterArgs& a, const Team& team) {
  a.dtype ? route<bf16>(a, team) : route<float>(a, team);
}

// Where on this rank the chosen experts are. A table has a place for each of an expert's copies,
// which take turns by row; -1: on another rank.
struct LocalExpertsArgs {
  const int32_t *ids, *place, *copies;  // [rows, top], [experts, most], [experts]
  int64_t* load;                        // [experts] or null: counts are added
  int32_t* y;                           // [rows, top]
  long rows, top, most;
};

inline Plan plan(const LocalExpertsArgs&, int) { return {false, 0}; }

inline void run(const LocalExpertsArgs& a, const Team&) {
  for (long i = 0; i < a.rows * a.top; i++) {
    const long id = a.ids[i];
    a.y[i] = id < 0 ? -1 : a.place[id * a.most + i / a.top % a.copies[id]];
    if (a.load && id >= 0) a.load[id]++;
  }
}
