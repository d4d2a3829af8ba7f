// Experts' MLPs over banks of CodesMatrix, for rows of bfloat16 that are quantized to int8.
//
//     u = x @ gate_up[e].T + bias     of each pair of a row and one of its experts, rounded
//     h = gate(u)                     rounded, then quantized as x is
//     v = h @ down[e].T + bias        rounded
//     y = sum over k of weights[k] * v, in the order of k
//
// An id of -1 is of an expert that another rank has, and adds nothing; any other without an expert
// makes its row NaN.
// Pairs are sorted by expert, so that an expert's panels are read once for all of its rows. A pair
// has the same sums in the same order whatever the rows beside it.
#pragma once
#include <algorithm>

#include "codes_linear.h"
#include "elementwise.h"

struct CodesExpertsArgs {
  const char* x;
  long x_row;  // bytes
  const int32_t* ids;  // [rows, top]
  const float* weights;
  const CodesMatrix *gate_up, *down;            // [experts]
  const bf16 *gate_up_bias, *down_bias;  // [experts, outputs] or null
  bf16* y;
  long rows, top, experts, kind;
  double alpha, limit;

  long width() const { return down->inputs; }
  long hidden() const { return down->outputs; }
};
enum { CLAMPED = 16 };  // a kind beside those of MapArgs

constexpr long EXPERTS_SCRATCH = 32L << 20;  // bytes of pairs in a round

INLINE long aligned(long bytes) { return (bytes + 63) / 64 * 64; }

// Memory of a round of `rows` rows.
struct ExpertPairs {
  long count;
  int32_t *place, *of, *starts;  // pair -> place by expert, or -1; place -> pair; [experts + 1]
  bf16 *u, *v;                   // [places, 2 width], [places, hidden]
  char *quantized, *own, *end;

  ExpertPairs(const CodesExpertsArgs& a, long rows, char* at) : count(rows * a.top) {
    const auto next = [&](long bytes) { return at += bytes, at - bytes; };
    place = (int32_t*)next(aligned(count * 4));
    of = (int32_t*)next(aligned(count * 4));
    starts = (int32_t*)next(aligned((a.experts + 1) * 4));
    u = (bf16*)next(aligned(count * a.gate_up->outputs * 2));
    v = (bf16*)next(aligned(count * a.hidden() * 2));
    const long first = QuantizedRows::bytes(*a.gate_up, count);
    const long second = QuantizedRows::bytes(*a.down, count);
    quantized = next(aligned(first > second ? first : second));
    own = end = at;
  }
};

INLINE long expert_rows(const CodesExpertsArgs& a) {  // of a round
  const long one = ExpertPairs(a, 1, nullptr).end - (char*)nullptr, most = EXPERTS_SCRATCH / one + 1;
  return a.rows < most ? a.rows : most;
}

INLINE long expert_scratch(const CodesExpertsArgs& a) {  // of a thread
  const long sizes[] = {panel_scratch(*a.gate_up), panel_scratch(*a.down), a.width() * 2};
  return aligned(*std::max_element(sizes, sizes + 3));
}

inline Plan plan(const CodesExpertsArgs& a, int threads) {
  const long pairs = ExpertPairs(a, expert_rows(a), nullptr).end - (char*)nullptr;
  return {a.rows * a.top * a.width() * a.hidden() > 32768, pairs + threads * expert_scratch(a)};
}

inline void sort_pairs(const CodesExpertsArgs& a, const int32_t* ids, const ExpertPairs& p) {
  memset(p.starts, 0, (a.experts + 1) * 4);
  const auto is_expert = [&](long i) { return ids[i] >= 0 && ids[i] < a.experts; };
  for (long i = 0; i < p.count; i++)
    if (is_expert(i)) p.starts[ids[i] + 1]++;
  for (long e = 0; e < a.experts; e++) p.starts[e + 1] += p.starts[e];
  for (long i = 0; i < p.count; i++) p.place[i] = is_expert(i) ? p.starts[ids[i]]++ : -1;
  for (long e = a.experts; e > 0; e--) p.starts[e] = p.starts[e - 1];
  p.starts[0] = 0;
  for (long i = 0; i < p.count; i++)
    if (p.place[i] >= 0) p.of[p.place[i]] = (int32_t)i;
}

template <int KIND>
INLINE vf gate_of(const CodesExpertsArgs& a, vf gate, vf up) {
  if constexpr (KIND == CLAMPED) {
    const vf limit = splat((float)a.limit);
    gate = vmin(limit, gate);  // the second where one is NaN
    up = vmax(-limit, vmin(limit, up));
    return gate / (1.0f + vexp(-(gate * (float)a.alpha))) * (up + 1.0f);
  }
  return apply<KIND>(gate, 0.0f) * up;
}

template <int KIND>
void gate_row(const CodesExpertsArgs& a, const bf16* u, bf16* h) {
  each(a.width(), [&](long i, long n) {
    put(h + i, gate_of<KIND>(a, get(u + i, n), get(u + a.width() + i, n)), n);
  });
}

inline void gate_row(const CodesExpertsArgs& a, const bf16* u, bf16* h) {
  switch (a.kind) {
    case SILU: return gate_row<SILU>(a, u, h);
    case GELU: return gate_row<GELU>(a, u, h);
    case GELU_TANH: return gate_row<GELU_TANH>(a, u, h);
    case RELU: return gate_row<RELU>(a, u, h);
    case QUICK_GELU: return gate_row<QUICK_GELU>(a, u, h);
    case CLAMPED: return gate_row<CLAMPED>(a, u, h);
  }
}

// Row `to` becomes a copy of row `from`.
inline void copy_row(const QuantizedRows& rows, long from, long to) {
  memcpy(rows.q + to * rows.row_bytes, rows.q + from * rows.row_bytes, rows.row_bytes);
  const long at = from * rows.units, there = to * rows.units, n = rows.units * 4;
  memcpy(rows.scale + there, rows.scale + at, n);
  memcpy(rows.start + there, rows.start + at, n);
  memcpy(rows.scaled_sum + there, rows.scaled_sum + at, n);
}

inline void quantize_tokens(const CodesExpertsArgs& a, const ExpertPairs& p, long first, long count,
                            const Team& team) {
  const QuantizedRows rows(p.quantized, *a.gate_up, p.count);
  long from, to;
  team.share(count, from, to);
  for (long t = from; t < to; t++) {
    const bf16* x = (const bf16*)(a.x + (first + t) * a.x_row);
    long done = -1;
    for (long k = 0; k < a.top; k++) {
      const long place = p.place[t * a.top + k];
      if (place < 0) continue;
      const CodesMatrix& m = a.gate_up[a.ids[(first + t) * a.top + k]];
      if (done >= 0 && !m.perm) {
        copy_row(rows, done, place);
        continue;
      }
      for (long at = 0; at < rows.units; at++) quantize_row_unit(m, x, rows, place, at);
      done = place;
    }
  }
}

inline void quantize_gated(const CodesExpertsArgs& a, const ExpertPairs& p, const int32_t* ids, bf16* h,
                           const Team& team) {
  const QuantizedRows rows(p.quantized, *a.down, p.count);
  long from, to;
  team.share(p.starts[a.experts], from, to);
  for (long i = from; i < to; i++) {
    gate_row(a, p.u + i * 2 * a.width(), h);
    for (long at = 0; at < rows.units; at++)
      quantize_row_unit(a.down[ids[p.of[i]]], h, rows, i, at);
  }
}

// The products of all experts' rows. Items of the round begin at `base`; `mine`: the next of this
// rank, which stays that of the next product. Returns the end of the items.
inline long multiply_experts(const CodesExpertsArgs& a, const ExpertPairs& p, const CodesMatrix* bank,
                             const bf16* bias, bf16* y, long base, long& mine, char* own,
                             const Team& team) {
  const QuantizedRows rows(p.quantized, *bank, p.count);
  for (long e = 0; e < a.experts; e++) {
    const long start = p.starts[e], count = p.starts[e + 1] - start;
    if (!count) continue;
    const CodesMatrix& m = bank[e];
    const CodesLinearArgs call{nullptr, 0, &m, bias ? bias + e * m.outputs : nullptr, y, count, 1};
    const long parts = row_parts(m, count, team.size), panels = parts * m.panels();
    const long grain = panel_grain(m, count), items = (panels + grain - 1) / grain;
    for (; mine < base + items; mine = team.take(1)) {
      const long at = (mine - base) * grain;
      multiply_items(call, rows, 0, start, count, parts, at, at + grain < panels ? at + grain : panels,
                     own);
    }
    base += items;
  }
  return base;
}

inline void add_experts(const CodesExpertsArgs& a, const ExpertPairs& p, long first, long count,
                        const Team& team) {
  const long pieces = (a.hidden() + W - 1) / W;
  long from, to;
  team.share(count * pieces, from, to);
  for (long i = from; i < to; i++) {
    const long t = i / pieces, at = i % pieces * W, n = a.hidden() - at < W ? a.hidden() - at : W;
    vf y{};
    for (long k = 0; k < a.top; k++) {
      const long place = p.place[t * a.top + k];
      if (a.ids[(first + t) * a.top + k] == -1) continue;
      const vf v = place < 0 ? splat(NAN) : get(p.v + place * a.hidden() + at, n);
      y += rounded(v * a.weights[(first + t) * a.top + k]);
    }
    put(a.y + (first + t) * a.hidden() + at, y, n);
  }
}

inline void run(const CodesExpertsArgs& a, const Team& team) {
  const long most = expert_rows(a);
  for (long first = 0; first < a.rows; first += most) {
    const long count = a.rows - first < most ? a.rows - first : most;
    const ExpertPairs p(a, count, team.scratch);
    const int32_t* ids = a.ids + first * a.top;
    char* own = ExpertPairs(a, most, team.scratch).end + team.rank * expert_scratch(a);
    bf16* h = (bf16*)own;
    if (team.rank == 0) {
      sort_pairs(a, ids, p);
      team.next->store(0);
    }
    team.barrier();
    quantize_tokens(a, p, first, count, team);
    team.barrier();
    long mine = team.take(1);
    const long end =
        multiply_experts(a, p, a.gate_up, a.gate_up_bias, p.u, 0, mine, own, team);
    team.barrier();
    quantize_gated(a, p, ids, h, team);
    team.barrier();
    multiply_experts(a, p, a.down, a.down_bias, p.v, end, mine, own, team);
    team.barrier();
    add_experts(a, p, first, count, team);
    team.barrier();
  }
}
