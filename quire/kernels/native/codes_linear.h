// grouped_linear, grouped_embedding over CodesMatrix.
//
//     bfloat16 rows   quantized to int8 by row and 32 inputs (16 where the weight has groups of 16):
//                     sums of integers within those, one product with the scales each
//     float32 rows    and tables that int8 cannot hold: codes are widened to float32, a slice of a
//                     panel at a time, for the tiles of `linear`
//
// An output is the same sums in the same order whatever the rows beside it and the threads.
#pragma once
#include "codes.h"
#include "linear.h"

struct CodesLinearArgs {
  const char* x;
  long x_row;  // bytes
  const CodesMatrix* w;
  const void* bias;
  void* y;
  long rows, dtype;
};

constexpr long WIDE_INPUTS = 256;    // of a slice of a panel in float32
constexpr long QUANT_ROWS = 512;     // rows that are quantized at a time
constexpr long WIDE_FACTORS = WIDE_INPUTS / 16 * PANEL * 3;  // floats of its factors, at most
constexpr int FUSED_ROWS = 4;        // up to so many, codes are unpacked in registers
constexpr int FLIPPED_ROWS = 16;     // up to so many, signed bytes are flipped in registers
constexpr long ITEMS = 8;            // of each thread, at least
constexpr long CODES_AHEAD = 4096;   // bytes of codes to prefetch

INLINE bool is_signed(const CodesMatrix& m) { return m.bits == 8 || m.levels; }

// Bytes of a row's integers: 8 bits each, or 16 where sums split them.
INLINE long integer_bytes(bool of_signed, long blocks) {
  return blocks * BLOCK * ((of_signed ? splits<SIGNED>() : splits<LONG>()) ? 2 : 1);
}

// Rows as integers [rows][inputs], padded with zeros; of each unit its scale, the number that sums
// of products start at (their integers times minus the code of zero), and scale times integers.
struct QuantizedRows {
  char* q;
  float* scale;
  int32_t* start;
  float* scaled_sum;
  long row_bytes, units;

  QuantizedRows(char* at, const CodesMatrix& m, long rows)
      : row_bytes(integer_bytes(is_signed(m), m.blocks())), units(m.units()) {
    scale = (float*)at;
    start = (int32_t*)(scale + rows * units);
    scaled_sum = (float*)(start + rows * units);
    q = (char*)(scaled_sum + rows * units);
  }
  static long bytes(const CodesMatrix& m, long rows) {
    return (rows * (integer_bytes(is_signed(m), m.blocks()) + m.units() * 12) + 64) / 64 * 64;
  }
};

INLINE bool in_integers(const CodesLinearArgs& a) { return a.dtype && (!a.w->table || a.w->levels); }

INLINE long quantized_rows(const CodesLinearArgs& a) {  // at a time, as evenly as it goes
  const long times = (a.rows + QUANT_ROWS - 1) / QUANT_ROWS;
  return times ? (a.rows + times - 1) / times : 0;
}

// Parts of the rows, each of which is multiplied by all panels.
INLINE long row_parts(long rows) { return (rows + TALL_BLOCK - 1) / TALL_BLOCK; }

INLINE bool unpacks(const CodesMatrix& m, long rows) {  // a panel to bytes, before it is multiplied
  if (m.bits == 8) return FLIPS && rows > FLIPPED_ROWS;
  return rows > FUSED_ROWS || (m.bits != 4 && m.levels);
}

// Bytes of rows in float32, in the order of the codes: 0 if they are that.
INLINE long widened_rows(const CodesLinearArgs& a) {
  return a.dtype || a.w->perm ? (a.rows * a.w->inputs * 4 + 64) / 64 * 64 : 0;
}

// Bytes that a thread has: for codes of a panel in bytes, and for the factors of two.
INLINE long panel_scratch(const CodesMatrix& m) {
  return m.blocks() * BLOCK * PANEL + 2 * GroupMeaning::floats(m.groups) * 4;
}

inline Plan plan(const CodesLinearArgs& a, int threads) {
  const CodesMatrix& m = *a.w;
  const bool parallel = a.rows * m.inputs * m.outputs > 32768;
  if (in_integers(a))
    return {parallel, QuantizedRows::bytes(m, quantized_rows(a)) + threads * panel_scratch(m)};
  const long wide = (WIDE_INPUTS * PANEL + TALL_BLOCK * PANEL + WIDE_FACTORS) * 4;
  return {parallel, widened_rows(a) + threads * wide};
}

// Values x[perm[from]] .. of one row in float32, zero past its end.
template <class T>
INLINE void gather(const CodesMatrix& m, const T* x, long from, long n, float* to) {
  const long live = m.inputs - from < n ? (m.inputs > from ? m.inputs - from : 0) : n;
  if (m.perm)
    for (long i = 0; i < live; i++) {
      const T one = x[m.perm[from + i]];
      if constexpr (sizeof(T) == 4) {
        to[i] = one;
      } else {
        const uint32_t bits = (uint32_t)one.bits << 16;
        memcpy(to + i, &bits, 4);
      }
    }
  else
    each(live, [&](long i, long k) { put(to + i, get(x + from + i, k), k); });
  for (long i = live; i < n; i++) to[i] = 0;
}

// Integers i .. i + W of a row, from -128 to 127, as sums of products expect them.
INLINE void store_integers(char* row, long i, vi whole, bool in_16_bits) {
  if (!in_16_bits) return store_bytes((int8_t*)row + i, whole);
  int16_t* to = (int16_t*)row + i;
#if defined(__AVX512F__)
  const __m256i h = _mm512_cvtepi32_epi16((__m512i)whole);
  _mm256_storeu_si256((__m256i*)to, _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(h, 0xd8), 0xd8));
#elif defined(__AVX2__)
  const __m256i w = (__m256i)whole;
  const __m128i h = _mm_packs_epi32(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
  _mm_storeu_si128((__m128i*)to, _mm_shufflehi_epi16(_mm_shufflelo_epi16(h, 0xd8), 0xd8));
#else
  const int place[] = {0, 2, 1, 3};
  for (int j = 0; j < W; j++) to[j / 4 * 4 + place[j % 4]] = (int16_t)whole[j];
#endif
}

// Quantize one unit of one row: x = q * scale, |q| <= 127. A unit with a NaN or an infinity has
// the scale NaN, and so have all outputs of its row.
INLINE void quantize_unit(const float* x, int n, char* q, bool in_16_bits, int32_t times,
                          float* scale, int32_t* start, float* scaled_sum) {
  vf top{}, bad{};
  for (int i = 0; i < n; i += W) {
    const vf v = load(x + i);
    top = vmax(top, (vf)((vi)v & 0x7fffffff));
    bad += v - v;
  }
  const float amax = largest(top), inverse = amax > 1e-30f ? 127.0f / amax : 0.0f;
  vi all{};
  for (int i = 0; i < n; i += W) {
    const vf v = rounded(load(x + i) * inverse) + ROUNDS;
    const vi whole = (vi)v - (vi)splat(ROUNDS);
    all += whole;
    store_integers(q, i, whole, in_16_bits);
  }
  const int32_t total = (int32_t)::sum(__builtin_convertvector(all, vf));  // below 2^24
  *scale = amax / 127.0f + ::sum(bad);
  *start = times * total;
  *scaled_sum = *scale * (float)total;
}

// What a tile reads: codes in bytes, in halves of them, or in planes of so many bits together.
enum Source { BYTES, NIBBLES, LEVELS, PLANES_2, PLANES_3, PLANES_5, PLANES_6 };
constexpr int plane_bits(Source s) {
  return s == PLANES_2 ? 2 : s == PLANES_3 ? 3 : s == PLANES_5 ? 5 : s == PLANES_6 ? 6 : 0;
}

// Panels of bytes that one row is multiplied by at a time, where there are registers: two streams from
// memory are read faster than one. Codes of fewer bits need the registers.
constexpr int ROW_PANELS = PV == 4 ? 2 : 1;

struct TileArgs {
  const CodesMatrix& m;
  const QuantizedRows& rows;
  const CodesLinearArgs& a;
  const char* codes;   // of the panel, as the tile reads them
  const GroupMeaning* means;  // of the panel, and of the next one
  long panel, first;  // first: the row of the call with which `rows` begins
  long next;          // from the panel to the other one of ROW_PANELS: 1, or 0 where there is none
};

// Vector j of a tile, in panels that are `next` bytes apart.
INLINE long vector_at(int j, long next) { return j / PV * next + j % PV * (W * 4); }

// acc += products of R rows and NV vectors of codes, over 8 inputs times `pairs`. Moves both on.
// next: bytes from a panel to the other one of a tile.
template <Source FROM, Sums S, int R, int NV>
INLINE void add_products(vi (&acc)[R][NV], const char*& at, long next, const char*& x, long x_row,
                         long pairs, const int8_t* levels) {
  constexpr long bytes = FROM == BYTES ? 2 * PANEL * 4 : PANEL * 4, x_bytes = splits<S>() ? 16 : 8;
  for (long p = 0; p < pairs; p++, at += bytes, x += x_bytes) {
    UNROLL for (int panel = 0; panel < (NV + PV - 1) / PV; panel++)
      UNROLL for (int line = 0; line < (R == 1 ? bytes : 128); line += 64)
        if (line < bytes) __builtin_prefetch(at + panel * next + CODES_AHEAD + line);
    vb a[NV], b[NV];
    UNROLL for (int j = 0; j < NV; j++) {
      if (FROM == BYTES) {
        a[j] = load_bytes(at + vector_at(j, next));
        b[j] = load_bytes(at + PANEL * 4 + vector_at(j, next));
      } else {
        const vb v = load_bytes(at + vector_at(j, next));
        a[j] = v & 15;
        b[j] = shift_right(v, 4) & 15;
        if (FROM == LEVELS) {
          a[j] = choose(a[j], levels);
          b[j] = choose(b[j], levels);
        }
      }
    }
    if constexpr (splits<S>()) {
      UNROLL for (int half = 0; half < 2; half++) {
        vs even[NV], odd[NV];
        UNROLL for (int j = 0; j < NV; j++) split<S>(half ? b[j] : a[j], even[j], odd[j]);
        UNROLL for (int i = 0; i < R; i++) {
          const vs x0 = (vs)broadcast<float>(x + i * x_row + half * 8);
          const vs x1 = (vs)broadcast<float>(x + i * x_row + half * 8 + 4);
          UNROLL for (int j = 0; j < NV; j++) {
            acc[i][j] += madd16(even[j], x0) + madd16(odd[j], x1);
            pin(acc[i][j]);
          }
        }
      }
    } else {
      UNROLL for (int i = 0; i < R; i++) {
        const vi x0 = broadcast<float>(x + i * x_row), x1 = broadcast<float>(x + i * x_row + 4);
        UNROLL for (int j = 0; j < NV; j++) {
          acc[i][j] = add_pair<S>(acc[i][j], a[j], b[j], x0, x1);
          pin(acc[i][j]);
        }
      }
    }
  }
}

// The same of `halves` of blocks from half `first` on, whose codes lie in planes.
template <int BITS, Sums S, int R, int NV>
INLINE void add_planes(vi (&acc)[R][NV], const char* codes, const char*& x, long x_row, long first,
                       long halves) {
  const char* block = codes + first / 2 * BITS * PANEL * 4;
  for (long h = first % 2; h < first % 2 + halves; h++, x += splits<S>() ? 32 : 16) {
    UNROLL for (int line = 0; line < BITS; line++)
      __builtin_prefetch(block + (h * BITS + line) * 64 + CODES_AHEAD);
    UNROLL for (int j = 0; j < NV; j++) {
      vb c[4];
      fetch_half<BITS>(block, h, j * W, c);
      if constexpr (splits<S>()) {
        vs even[4], odd[4];
        UNROLL for (int k = 0; k < 4; k++) split<S>(c[k], even[k], odd[k]);
        UNROLL for (int i = 0; i < R; i++) {
          const char* at = x + i * x_row;
          UNROLL for (int k = 0; k < 4; k++)
            acc[i][j] += madd16(even[k], (vs)broadcast<float>(at + k * 8)) +
                         madd16(odd[k], (vs)broadcast<float>(at + k * 8 + 4));
          pin(acc[i][j]);
        }
      } else {
        UNROLL for (int i = 0; i < R; i++) {
          const char* at = x + i * x_row;
          UNROLL for (int k = 0; k < 4; k += 2)
            acc[i][j] = add_pair<S>(acc[i][j], c[k], c[k + 1], broadcast<float>(at + k * 4),
                                    broadcast<float>(at + k * 4 + 4));
          pin(acc[i][j]);
        }
      }
    }
  }
}

// y of R rows from `row` on and NV vectors of outputs from `column` of the panel on, or of two panels.
// ALONE: a group is one unit.
template <class T, Source FROM, Sums S, int R, int NV, bool ALONE>
__attribute__((noinline)) void codes_tile(const TileArgs& t, long row, long column) {
  const CodesMatrix& m = t.m;
  const long pairs = m.unit_inputs() / 8, units = m.units(), per_group = ALONE ? 1 : m.group_units();
  const char* x = t.rows.q + row * t.rows.row_bytes;
  const long x_row = t.rows.row_bytes, s_row = t.rows.units;
  const float *scales = t.rows.scale + row * s_row, *shifts = t.rows.scaled_sum + row * s_row;
  const int32_t* starts = t.rows.start + row * s_row;
  const char* at = t.codes + column * 4;
  const long next = t.next * m.panel_bytes();
  const GroupMeaning* const means[] = {t.means, t.means + t.next};
  vf y[R][NV] = {};
  for (long g = 0, u = 0; g < m.groups; g++) {
    const long end = ALONE ? u + 1 : g + 1 == m.groups ? units : u + per_group;
    vf f[R][NV] = {};
    float shift[R] = {};
    for (; u < end; u++, scales++, shifts++, starts++) {
      vi acc[R][NV] = {};
      if constexpr (starts_anywhere<S>())
        UNROLL for (int i = 0; i < R; i++) UNROLL for (int j = 0; j < NV; j++)
          acc[i][j] = broadcast<float>((const char*)(starts + i * s_row));
      if constexpr (plane_bits(FROM) != 0)
        add_planes<plane_bits(FROM), S, R, NV>(acc, at, x, x_row, u * pairs / 2, pairs / 2);
      else
        add_products<FROM, S, R, NV>(acc, at, next, x, x_row, pairs, m.levels);
      UNROLL for (int i = 0; i < R; i++) {
        const vi start = starts_anywhere<S>() ? vi{} : broadcast<float>((const char*)(starts + i * s_row));
        const vf scale = splat(scales[i * s_row]);
        UNROLL for (int j = 0; j < NV; j++) {
          const vf v = rounded(__builtin_convertvector(total<S>(acc[i][j]) + start, vf) * scale);
          f[i][j] = ALONE ? v : f[i][j] + v;
        }
        shift[i] = ALONE ? shifts[i * s_row] : shift[i] + shifts[i * s_row];
      }
    }
    const long factor = g * PANEL + column;
    UNROLL for (int j = 0; j < NV; j++) {
      const vf scale = load(means[j / PV]->scale + factor + j % PV * W);
      UNROLL for (int i = 0; i < R; i++) y[i][j] += rounded(f[i][j] * scale);
    }
    if (t.means->offset)
      UNROLL for (int j = 0; j < NV; j++) {
        const vf offset = load(means[j / PV]->offset + factor + j % PV * W);
        UNROLL for (int i = 0; i < R; i++) y[i][j] += rounded(offset * shift[i]);
      }
  }
  const long outputs = m.outputs;
  UNROLL for (int j = 0; j < NV; j++) {
    const long o = (t.panel + j / PV * t.next) * PANEL + column + j % PV * W;
    const long n = outputs - o < W ? outputs - o : W;
    if (n <= 0) break;
    const vf bias = t.a.bias ? get((const T*)t.a.bias + o, n) : vf{};
    UNROLL for (int i = 0; i < R; i++)
      put((T*)t.a.y + (t.first + row + i) * outputs + o, y[i][j] + bias, n);
  }
}

template <Source FROM, Sums S>
struct CodesTiles {
  const TileArgs& t;
  static constexpr int ROWS = FROM == BYTES && (S == LONG || S == FLIPPED) ? 5 : FUSED_ROWS;
  static constexpr int PANELS = FROM == BYTES && S == SIGNED ? ROW_PANELS : 1;  // of one row
  template <int R, int NV>
  void tile(long row, long column) const {
    if (t.m.groups == t.rows.units)
      codes_tile<bf16, FROM, S, R, NV, true>(t, row, column);
    else
      codes_tile<bf16, FROM, S, R, NV, false>(t, row, column);
  }
};

template <int R, class F>
void call_tile(const F& f, long rows, long row, long column) {
  if constexpr (R > 1) {
    if (rows != R) return call_tile<R - 1>(f, rows, row, column);
    f.template tile<R, 2>(row, column);
  }
}

// Tiles of `count` rows from `row` on, times a panel: of up to F::ROWS rows and two vectors, or of
// one row and all vectors of F::PANELS.
template <class F>
void cover_panel(const F& f, long row, long count) {
  if (count == 1) return f.template tile<1, F::PANELS * PV>(row, 0);
  const long tiles = (count + F::ROWS - 1) / F::ROWS;
  for (long column = 0; column < PANEL; column += 2 * W)
    for (long i = 0; i < tiles; i++) {
      const long from = row + count * i / tiles, to = row + count * (i + 1) / tiles;
      call_tile<F::ROWS>(f, to - from, from, column);
    }
}

constexpr uint8_t FLIP = FLIPS ? 128 : 0;  // of signed codes in a buffer

template <int BITS, bool CHOOSES>
void unpack_panel(const CodesMatrix& m, const char* codes, char* to) {
  const long blocks = m.blocks(), row = PANEL * 4;
  for (long block = 0; block < blocks; block++, codes += BITS * row) {
    UNROLL for (int line = 0; line < BITS * row; line += 64)
      __builtin_prefetch(codes + CODES_AHEAD + line);
    UNROLL for (int h = 0; h < 2; h++, to += 4 * row)
      UNROLL for (int column = 0; column < PANEL; column += W) {
        vb c[4];
        fetch_half<BITS>(codes, h, column, c);
        UNROLL for (int i = 0; i < 4; i++) {
          if (CHOOSES) c[i] = choose(c[i], m.levels) ^ FLIP;
          memcpy(to + i * row + column * 4, &c[i], sizeof c[i]);
        }
      }
  }
}

inline void unpack_panel(const CodesMatrix& m, const char* codes, char* to) {
  if (m.bits == 8) {
    for (long i = 0; i < m.panel_bytes(); i += sizeof(vb)) {
      const vb flipped = load_bytes(codes + i) ^ FLIP;
      memcpy(to + i, &flipped, sizeof flipped);
    }
    return;
  }
  if (m.bits == 2) return m.levels ? unpack_panel<2, true>(m, codes, to) : unpack_panel<2, false>(m, codes, to);
  if (m.bits == 3) return m.levels ? unpack_panel<3, true>(m, codes, to) : unpack_panel<3, false>(m, codes, to);
  if (m.bits == 4) return m.levels ? unpack_panel<4, true>(m, codes, to) : unpack_panel<4, false>(m, codes, to);
  m.bits == 5 ? unpack_panel<5, false>(m, codes, to) : unpack_panel<6, false>(m, codes, to);
}

// Quantize unit `at` of row `row`, whose numbers are x.
inline void quantize_row_unit(const CodesMatrix& m, const bf16* x, const QuantizedRows& rows,
                              long row, long at) {
  const long unit = m.unit_inputs(), width = integer_bytes(is_signed(m), 1) / BLOCK;
  const int32_t centre = (int32_t)m.centre + (is_signed(m) && FLIPS ? 128 : 0);
  const long i = row * rows.units + at;
  float wide[BLOCK];
  gather(m, x, at * unit, unit, wide);
  quantize_unit(wide, (int)unit, rows.q + row * rows.row_bytes + at * unit * width, width == 2, -centre,
                rows.scale + i, rows.start + i, rows.scaled_sum + i);
}

// Products of `count` of the quantized rows, from `row` on, and one panel, of one row also of the
// `next` (0 or 1) panel. own: panel_scratch bytes.
inline void multiply_panel(const CodesLinearArgs& a, const QuantizedRows& rows, long first, long panel,
                           long next, long row, long count, bool unpacked, char* own) {
  const CodesMatrix& m = *a.w;
  float* factors = (float*)own + m.blocks() * BLOCK * PANEL / 4;
  const char* codes = m.codes + panel * m.panel_bytes();
  if (unpacked) unpack_panel(m, codes, own);
  const GroupMeaning means[] = {
      {m, panel, 0, m.groups, (float)m.unit, factors},
      {m, panel + next, 0, next ? m.groups : 0, (float)m.unit, factors + GroupMeaning::floats(m.groups)}};
  const TileArgs t{m, rows, a, unpacked ? own : codes, means, panel, first, next};
  if (m.levels && !unpacked)
    cover_panel(CodesTiles<LEVELS, SIGNED>{t}, row, count);
  else if (FLIPS && unpacked && (m.levels || m.bits == 8))
    cover_panel(CodesTiles<BYTES, FLIPS ? FLIPPED : SIGNED>{t}, row, count);
  else if (m.levels || m.bits == 8)
    cover_panel(CodesTiles<BYTES, SIGNED>{t}, row, count);
  else if (!unpacked && m.bits == 4)
    cover_panel(CodesTiles<NIBBLES, LONG>{t}, row, count);
  else if (!unpacked)
    switch (m.bits) {
      case 2: return cover_panel(CodesTiles<PLANES_2, LONG>{t}, row, count);
      case 3: return cover_panel(CodesTiles<PLANES_3, LONG>{t}, row, count);
      case 5: return cover_panel(CodesTiles<PLANES_5, SHORT>{t}, row, count);
      default: return cover_panel(CodesTiles<PLANES_6, SHORT>{t}, row, count);
    }
  else if (m.bits <= 4)
    cover_panel(CodesTiles<BYTES, LONG>{t}, row, count);
  else
    cover_panel(CodesTiles<BYTES, SHORT>{t}, row, count);
}

// The same where each part unpacks each panel again: no more parts than the threads need.
INLINE long row_parts(const CodesMatrix& m, long rows, int threads) {
  const long most = row_parts(rows), wanted = (ITEMS * threads + m.panels() - 1) / m.panels();
  return wanted < most && unpacks(m, rows) ? wanted : most;
}

// Products of rows of one part of `parts` and the panels of items [item, end): panels of the first
// part, then of the next.
inline void multiply_items(const CodesLinearArgs& a, const QuantizedRows& rows, long first, long start,
                           long count, long parts, long item, long end, char* own) {
  const long panels = a.w->panels();
  const bool unpacked = unpacks(*a.w, count);
  const long most = count == 1 && a.w->bits == 8 ? ROW_PANELS : 1;
  for (long i = item; i < end;) {
    const long part = i / panels, panel = i % panels, row = count * part / parts;
    const long next = most > 1 && i + 1 < end && panel + 1 < panels;
    multiply_panel(a, rows, first, panel, next, start + row, count * (part + 1) / parts - row, unpacked,
                   own);
    i += 1 + next;
  }
}

// Panels that a thread takes at a time.
INLINE long panel_grain(const CodesMatrix& m, long rows) {
  return rows > FUSED_ROWS ? 1 : (65536 / m.panel_bytes() + 2) / 2 * 2;
}

inline void codes_integers(const CodesLinearArgs& a, const Team& team) {
  const CodesMatrix& m = *a.w;
  const long most = quantized_rows(a), panels = m.panels();
  const QuantizedRows rows(team.scratch, m, most);
  char* own = team.scratch + QuantizedRows::bytes(m, most) + team.rank * panel_scratch(m);
  for (long first = 0; first < a.rows; first += most) {
    const long count = a.rows - first < most ? a.rows - first : most;
    if (first) {
      team.barrier();
      if (team.rank == 0) team.next->store(0);
      team.barrier();
    }
    long from, to;
    team.share(count * rows.units, from, to);
    for (long i = from; i < to; i++) {
      const long row = i / rows.units;
      quantize_row_unit(m, (const bf16*)(a.x + (first + row) * a.x_row), rows, row, i % rows.units);
    }
    team.barrier();
    const long parts = row_parts(m, count, team.size), items = parts * panels;
    const long grain = panel_grain(m, count);
    for (long item; (item = team.take(grain)) < items;)
      multiply_items(a, rows, first, 0, count, parts, item, item + grain < items ? item + grain : items,
                     own);
  }
}

// Values of inputs [from, from + n) and of columns [low, high) of a panel, as float32 [n][32].
// from: a multiple of BLOCK. factors: memory of GroupMeaning for them.
inline void widen_panel(const CodesMatrix& m, long panel, long from, long n, long low, long high,
                        float* factors, float* to) {
  const char* codes = m.codes + panel * m.panel_bytes() + from / BLOCK * m.bits * PANEL * 4;
  const long size = 1L << m.bits, first = m.groups == 1 ? 0 : from / m.group;
  const long last = m.groups == 1 ? 0 : (from + n - 1) / m.group;
  const GroupMeaning means(m, panel, first, last + 1, 1.0f, factors);
  for (long i = 0; i < n; i += 16) {  // a group has a multiple of 16 inputs, or all
    const long group = m.groups == 1 ? 0 : (from + i) / m.group - first;
    const char* block = codes + i / BLOCK * m.bits * PANEL * 4;
    for (long column = low; column < high; column += W) {
      vb steps[4];
      fetch_half(m.bits, block, i % BLOCK / 16, column, steps);
      const long at_factor = group * PANEL + column;
      const vf scale = load(means.scale + at_factor);
      const vf offset = means.offset ? load(means.offset + at_factor) : vf{};
      for (long k = 0; k < 16 && i + k < n; k++) {
        const vi dwords = (vi)steps[k / 4];
        const int at = (int)(k % 4 * 8);
        vf value;
        if (m.table) {
          const vi code = ((vi)((vu)dwords >> at) & 255) ^ (m.bits == 8 ? 128 : 0);
          const long o = m.own_table ? panel * PANEL + column : 0;
          for (int lane = 0; lane < W; lane++)
            value[lane] = m.table[(m.own_table ? o + lane : 0) * size + code[lane]];
        } else {
          const vi code =
              m.bits == 8 ? dwords << (24 - at) >> 24 : (vi)((vu)dwords >> at) & 255;
          value = __builtin_convertvector(code - (int32_t)m.centre, vf);
        }
        store(to + (i + k) * PANEL + column, value * scale + offset);
      }
    }
  }
}

template <class T>
void codes_floats(const CodesLinearArgs& a, const Team& team) {
  const CodesMatrix& m = *a.w;
  const char* x = a.x;
  long x_row = a.x_row, from, to;
  if (widened_rows(a)) {
    team.share(a.rows, from, to);
    for (long row = from; row < to; row++)
      gather(m, (const T*)(a.x + row * a.x_row), 0, m.inputs,
             (float*)team.scratch + row * m.inputs);
    x = team.scratch;
    x_row = m.inputs * 4;
    team.barrier();
  }
  const long wide_bytes = (WIDE_INPUTS * PANEL + WIDE_FACTORS) * 4;
  const long sums_bytes = TALL_BLOCK * PANEL * 4;
  char* own = team.scratch + widened_rows(a) + team.rank * (wide_bytes + sums_bytes);
  float *wide = (float*)own, *sums = (float*)(own + wide_bytes);
  const LinearArgs plain{x, x_row, nullptr, a.bias, a.y, a.rows, m.inputs, m.outputs, a.dtype};
  const long parts = (a.rows + TALL_BLOCK - 1) / TALL_BLOCK, items = parts * m.panels();
  for (long item; (item = team.take(1)) < items;) {
    const long panel = item / parts, row = item % parts * TALL_BLOCK;
    const Tiles<float> tiles(a.rows - row < TALL_BLOCK ? a.rows - row : TALL_BLOCK);
    for (long at = 0; at < m.inputs; at += WIDE_INPUTS) {
      const long n = m.inputs - at < WIDE_INPUTS ? m.inputs - at : WIDE_INPUTS;
      widen_panel(m, panel, at, n, 0, PANEL, wide + WIDE_INPUTS * PANEL, wide);
      const Operand o{x + row * x_row + at * 4, x_row, 4, 0, own, 0, n, 0, own};
      tiles.product(1, o, false, sums, PANEL, at > 0);
    }
    finish<T>(plain, sums, PANEL, row, tiles.rows, panel * PANEL, PANEL);
  }
}

inline void run(const CodesLinearArgs& a, const Team& team) {
  if (in_integers(a)) return codes_integers(a, team);
  a.dtype ? codes_floats<bf16>(a, team) : codes_floats<float>(a, team);
}

struct CodesEmbeddingArgs {
  const int32_t* ids;
  const CodesMatrix* w;
  char* y;
  long rows, dtype;
  double scale;
};

inline Plan plan(const CodesEmbeddingArgs& a, int threads) {
  return {a.rows * a.w->inputs > 4096, threads * (WIDE_INPUTS * PANEL + WIDE_FACTORS + a.w->inputs) * 4};
}

template <class T>
void embed_codes(const CodesEmbeddingArgs& a, const Team& team) {
  const CodesMatrix& m = *a.w;
  const long inputs = m.inputs;
  float* wide = (float*)team.scratch + team.rank * (WIDE_INPUTS * PANEL + WIDE_FACTORS + inputs);
  float* row = wide + WIDE_INPUTS * PANEL + WIDE_FACTORS;
  long from, to;
  team.share(a.rows, from, to);
  for (long t = from; t < to; t++) {
    const long id = a.ids[t], lane = id % PANEL;
    T* y = (T*)a.y + t * inputs;
    if (id < 0 || id >= m.outputs) {  // never read outside; NaN shows up at once
      memset(y, 0xff, inputs * sizeof(T));
      continue;
    }
    for (long at = 0; at < inputs; at += WIDE_INPUTS) {
      const long n = inputs - at < WIDE_INPUTS ? inputs - at : WIDE_INPUTS;
      widen_panel(m, id / PANEL, at, n, lane / W * W, lane / W * W + W, wide + WIDE_INPUTS * PANEL,
                  wide);
      for (long i = 0; i < n; i++) row[m.perm ? m.perm[at + i] : at + i] = wide[i * PANEL + lane];
    }
    each(inputs, [&](long i, long n) { put(y + i, get(row + i, n), n); });
    if (a.scale != 1.0)
      each(inputs, [&](long i, long n) { put(y + i, get(y + i, n) * (float)a.scale, n); });
  }
}

inline void run(const CodesEmbeddingArgs& a, const Team& team) {
  a.dtype ? embed_codes<bf16>(a, team) : embed_codes<float>(a, team);
}
