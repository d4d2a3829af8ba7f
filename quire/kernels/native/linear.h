// linear, pack, embedding.
#pragma once
#include "thread_pool.h"
#include "panel_gemm.h"

struct Plan {
  bool parallel;
  long scratch;  // bytes, shared by the ranks
};

struct LinearArgs {
  const char* x;
  long x_row;  // bytes
  const char* w;
  const void* bias;
  void* y;
  long rows, inputs, outputs, dtype;
};

constexpr int MOST_PANELS = 2;  // at once: memory gives less where there are more streams
constexpr long AHEAD = 2048;  // bytes of a panel to prefetch
constexpr long ROW_BLOCK = MAX_ROWS * 72L;  // rows whose packed form the ranks share at a time
constexpr long WIDE_BLOCK = 4 * 96;         // rows that they write as floats at a time
constexpr long SLICE_STEPS = 512;           // of a panel that is multiplied by such rows
constexpr long TALL_BLOCK = 96;             // rows that stay in a cache while a panel is multiplied by them

INLINE long steps_of(long inputs, long dtype) { return dtype ? (inputs + 1) / 2 : inputs; }

// How products find their rows: as they are given, or as the ranks wrote them before: [steps][rows] dwords
// of a tile, or rows of floats that are ROW_GAP further apart, so that they do not share lines of a cache.
enum class RowForm { GIVEN, PACKED, WIDE };
constexpr long ROW_GAP = 64;  // bytes

// Tiles of slices have few enough rows to read them unpacked.
INLINE RowForm row_form(const LinearArgs& a) {
  if (SLICES && a.rows > FEW_ROWS) return RowForm::WIDE;
  return a.rows > FEW_ROWS || (a.dtype && a.inputs % 2) ? RowForm::PACKED : RowForm::GIVEN;
}

// Rows that are written at a time.
INLINE long block_of(const LinearArgs& a) {
  const RowForm form = row_form(a);
  const long most = form == RowForm::GIVEN ? TALL_BLOCK : form == RowForm::WIDE ? WIDE_BLOCK : ROW_BLOCK;
  return a.rows < most ? a.rows : most;
}

// Rows that are multiplied by a panel at a time; a rank has sums of so many times 4 panels.
INLINE long sums_rows(const LinearArgs& a) {
  const long block = block_of(a);
  return SLICES && block > TALL_BLOCK ? TALL_BLOCK : block;
}

INLINE long wide_row(const LinearArgs& a) { return (a.inputs + 1) / 2 * 8 + ROW_GAP; }

INLINE long sums_offset(const LinearArgs& a) {  // bytes of scratch before them: written rows
  const RowForm form = row_form(a);
  if (form == RowForm::GIVEN) return 0;
  const long row = form == RowForm::WIDE ? wide_row(a) : steps_of(a.inputs, a.dtype) * 4;
  return (block_of(a) * row + 256) / 64 * 64;
}

// One row as floats, with a zero where a pair has no second.
template <class T>
void widen_row(const LinearArgs& a, long row, float* to) {
  const T* x = (const T*)(a.x + row * a.x_row);
  each(a.inputs, [&](long i, long n) { put(to + i, get(x + i, n), n); });
  if (a.inputs % 2) to[a.inputs] = 0;
}

// Rows [from, from + rows) as [steps][rows] dwords.
inline void pack_tile(const LinearArgs& a, long from, int rows, uint32_t* out) {
  long steps = steps_of(a.inputs, a.dtype), whole = a.dtype ? a.inputs / 2 : a.inputs;
  const uint32_t* at[16];
  for (int i = 0; i < 16; i++)
    at[i] = (const uint32_t*)(a.x + (from + (i < rows ? i : 0)) * a.x_row);
  long k = 0;
  for (; k + 16 <= whole; k += 16) {
    if (k + 32 <= whole) {  // what is too much lands in steps that come later
      transpose16(at, out + k * rows, rows);
    } else {
      uint32_t turned[16 * 16];
      transpose16(at, turned, 16);
      for (int s = 0; s < 16; s++) memcpy(out + (k + s) * rows, turned + s * 16, rows * 4);
    }
    for (int i = 0; i < 16; i++) at[i] += 16;
  }
  for (; k < steps; k++)
    for (int i = 0; i < rows; i++) {
      uint32_t x = 0;
      memcpy(&x, a.x + (from + i) * a.x_row + k * 4, k < whole ? 4 : 2);
      out[k * rows + i] = x;
    }
}

// fp32 results of a tile -> y, with the bias, in the dtype of y. Columns past the end are dropped.
template <class T>
void finish(const LinearArgs& a, const float* from, long stride, long row, long rows, long column,
            long columns) {
  const long end = a.outputs - column < columns ? a.outputs - column : columns;
  const T* bias = a.bias ? (const T*)a.bias + column : nullptr;
  for (long i = 0; i < rows; i++) {
    T* y = (T*)a.y + (row + i) * a.outputs + column;
    const float* x = from + i * stride;
    if (bias)
      each(end, [&](long c, long n) { put(y + c, load(x + c) + get(bias + c, n), n); });
    else
      each(end, [&](long c, long n) { put(y + c, load(x + c), n); });
  }
}

// Rows [first, first + rows), `block` of them at a time. x: where the first of them is, in `form`.
template <class T, class OUT>
void linear_block(const LinearArgs& a, const Team& team, RowForm form, const char* x, long first,
                  long rows, long block) {
  const long steps = steps_of(a.inputs, a.dtype), panel_bytes = steps * PANEL * 4;
  const long panels = (a.outputs + PANEL - 1) / PANEL;
  const bool packed = form == RowForm::PACKED;
  const long x_row = packed ? steps * 4 : form == RowForm::WIDE ? wide_row(a) : a.x_row;
  const long x_step = form == RowForm::WIDE && a.dtype ? 8 : 4;
  const long slice = form == RowForm::WIDE ? SLICE_STEPS : steps;
  const int most = panels_at_once((int)(rows < MAX_ROWS ? rows : MAX_ROWS));
  const int wide = most < MOST_PANELS ? most : MOST_PANELS;
  const long grain = rows > 4 ? 1 : 65536 / (panel_bytes * wide) + 1;
  const long groups = (panels + wide - 1) / wide, items = (rows + block - 1) / block * groups;
  float* sums = (float*)(team.scratch + sums_offset(a)) + team.rank * block * wide * PANEL;
  for (long item = team.take(grain), after; item < items; item = after) {
    after = team.take(grain);
    const long from = item / groups * block, g = item % groups, next = after % groups;
    const Tiles<T> tiles(rows - from < block ? rows - from : block);
    const long end = (g + grain) * wide < panels ? (g + grain) * wide : panels;
    for (long p = g * wide; p < end;) {
      const int np = p + wide <= panels ? wide : 1;
      const long later = p + np < end ? p + np : after < items ? next * wide : p;
      for (long k = 0; k < steps; k += slice) {
        const char* w = a.w + p * panel_bytes + k * PANEL * 4;
        const bool last = k + slice >= steps;
        const Operand o{x + from * x_row + k * x_step,
                        packed ? 4 : x_row,
                        x_step,
                        0,
                        w,
                        panel_bytes,
                        last ? steps - k : slice,
                        AHEAD,
                        last ? a.w + later * panel_bytes : w + slice * PANEL * 4};
        tiles.product(np, o, packed, sums, np * PANEL, k > 0);
      }
      finish<OUT>(a, sums, np * PANEL, first + from, tiles.rows, p * PANEL, np * PANEL);
      p += np;
    }
  }
}

template <class T>
void linear_all(const LinearArgs& a, const Team& team) {
  if (!a.rows) return;
  const RowForm form = row_form(a);
  const long block = sums_rows(a), most = block_of(a);
  if (form == RowForm::GIVEN) return linear_block<T, T>(a, team, form, a.x, 0, a.rows, block);
  const long steps = steps_of(a.inputs, a.dtype);
  for (long first = 0; first < a.rows; first += most) {
    const long rows = a.rows - first < most ? a.rows - first : most;
    if (first) {
      team.barrier();
      if (team.rank == 0) team.next->store(0);
      team.barrier();
    }
    if (form == RowForm::WIDE) {
      for (long i = team.rank; i < rows; i += team.size)
        widen_row<T>(a, first + i, (float*)(team.scratch + i * wide_row(a)));
      team.barrier();
      linear_block<std::conditional_t<std::is_same_v<T, bf16>, WideRows, T>, T>(a, team, form, team.scratch, first, rows, block);
      continue;
    }
    const Tiles<T> tiles(rows);
    for (long i = team.rank; i < tiles.count; i += team.size)
      pack_tile(a, first + tiles.start(i), (int)(tiles.start(i + 1) - tiles.start(i)),
                (uint32_t*)team.scratch + tiles.start(i) * steps);
    team.barrier();
    linear_block<T, T>(a, team, form, team.scratch, first, rows, rows);
  }
}

#include "amx_linear.h"

inline Plan plan(const LinearArgs& a, int threads) {
  const long steps = steps_of(a.inputs, a.dtype);
  const bool parallel = a.rows * steps * a.outputs > 16384;
  if (a.dtype && has_tiles()) return {parallel, amx_scratch(a, threads)};
  return {parallel, sums_offset(a) + threads * sums_rows(a) * 4 * PANEL * 4};
}

inline void run(const LinearArgs& a, const Team& team) {
  if (a.dtype && has_tiles()) return amx_linear(a, team);
  a.dtype ? linear_all<bf16>(a, team) : linear_all<float>(a, team);
}

struct PackArgs {
  const char* w;
  long w_row;  // bytes
  uint32_t* out;
  long inputs, outputs, dtype;
};

inline Plan plan(const PackArgs&, int) { return {true, 0}; }

inline void run(const PackArgs& a, const Team& team) {
  const long steps = steps_of(a.inputs, a.dtype), whole = a.dtype ? a.inputs / 2 : a.inputs;
  const long panels = (a.outputs + PANEL - 1) / PANEL;
  for (long p; (p = team.take(1)) < panels;)
    for (long half = 0; half < PANEL; half += 16) {
      const long first = p * PANEL + half, left = a.outputs - first;
      uint32_t* out = a.out + p * steps * PANEL + half;
      const uint32_t* at[16];
      for (int i = 0; i < 16; i++) at[i] = (const uint32_t*)(a.w + (first + i) * a.w_row);
      long k = 0;
      if (left >= 16)
        for (; k + 16 <= whole; k += 16) {
          transpose16(at, out + k * PANEL, PANEL);
          for (int i = 0; i < 16; i++) at[i] += 16;
        }
      for (; k < steps; k++)
        for (long i = 0; i < 16; i++) {
          uint32_t x = 0;
          if (i < left) memcpy(&x, a.w + (first + i) * a.w_row + k * 4, k < whole ? 4 : 2);
          out[k * PANEL + i] = x;
        }
    }
}

struct EmbeddingArgs {
  const int32_t* ids;
  const char* w;
  char* y;
  long rows, outputs, inputs, dtype, packed;
  double scale;
};

inline Plan plan(const EmbeddingArgs& a, int) { return {a.rows * a.inputs > 16384, 0}; }

template <class T>
void embed(const EmbeddingArgs& a, const Team& team) {
  const long size = sizeof(T), steps = steps_of(a.inputs, a.dtype);
  long from, to;
  team.share(a.rows, from, to);
  for (long t = from; t < to; t++) {
    const long id = a.ids[t];
    char* y = a.y + t * a.inputs * size;
    if (id < 0 || id >= a.outputs) {  // never read outside; NaN shows up at once
      memset(y, 0xff, a.inputs * size);
      continue;
    }
    if (a.packed) {
      const char* w = a.w + (id / PANEL * steps * PANEL + id % PANEL) * 4;
      long bytes = a.inputs * size;
      for (long k = 0; k < steps; k++, bytes -= 4)
        memcpy(y + k * 4, w + k * PANEL * 4, bytes < 4 ? bytes : 4);
    } else {
      memcpy(y, a.w + id * a.inputs * size, a.inputs * size);
    }
    if (a.scale != 1.0)
      each(a.inputs, [&](long i, long n) {
        put((T*)y + i, get((T*)y + i, n) * (float)a.scale, n);
      });
  }
}

inline void run(const EmbeddingArgs& a, const Team& team) {
  a.dtype ? embed<bf16>(a, team) : embed<float>(a, team);
}
