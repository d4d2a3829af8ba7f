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

constexpr long AHEAD = 2048;  // bytes of a panel to prefetch
constexpr long ROW_BLOCK = MAX_ROWS * 72L;  // rows whose packed form the ranks share at a time

INLINE long steps_of(long inputs, long dtype) { return dtype ? (inputs + 1) / 2 : inputs; }

INLINE bool packs_rows(const LinearArgs& a) {
  return a.rows > 8 || (a.dtype && a.inputs % 2);
}

inline Plan plan(const LinearArgs& a, int) {
  long steps = steps_of(a.inputs, a.dtype);
  long rows = a.rows < ROW_BLOCK ? a.rows : ROW_BLOCK;
  long scratch = packs_rows(a) ? (rows * steps + 64) * 4 : 0;
  return {a.rows * steps * a.outputs > 16384, scratch};
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
void finish(const LinearArgs& a, const float* from, long stride, long row, int rows, long column,
            long columns) {
  const long end = a.outputs - column < columns ? a.outputs - column : columns;
  const T* bias = a.bias ? (const T*)a.bias + column : nullptr;
  for (int i = 0; i < rows; i++) {
    T* y = (T*)a.y + (row + i) * a.outputs + column;
    const float* x = from + i * stride;
    if (bias)
      each(end, [&](long c, long n) { put(y + c, load(x + c) + get(bias + c, n), n); });
    else
      each(end, [&](long c, long n) { put(y + c, load(x + c), n); });
  }
}

template <class T>
void linear_block(const LinearArgs& a, const Team& team, long first, long rows) {
  const long steps = steps_of(a.inputs, a.dtype), panel_bytes = steps * PANEL * 4;
  const long panels = (a.outputs + PANEL - 1) / PANEL;
  const bool packed = packs_rows(a);
  const Tiles tiles(rows);
  uint32_t* scratch = (uint32_t*)team.scratch;
  if (packed) {
    for (long i = team.rank; i < tiles.count; i += team.size)
      pack_tile(a, first + tiles.start(i), (int)(tiles.start(i + 1) - tiles.start(i)),
                scratch + tiles.start(i) * steps);
    team.barrier();
  }
  const int wide = panels_at_once((int)(rows < MAX_ROWS ? rows : MAX_ROWS));
  const long grain = rows > 4 ? 1 : 65536 / (panel_bytes * wide) + 1;
  const long groups = (panels + wide - 1) / wide;
  alignas(64) float sums[MAX_ACC * W];
  for (long g = team.take(grain), after; g < groups; g = after) {
    after = team.take(grain);
    const long end = (g + grain) * wide < panels ? (g + grain) * wide : panels;
    for (long p = g * wide; p < end;) {
      const int np = p + wide <= panels ? wide : 1;
      const long later = p + np < end ? p + np : after < groups ? after * wide : p;
      for (long i = 0; i < tiles.count; i++) {
        const long at = tiles.start(i);
        const int height = (int)(tiles.start(i + 1) - at);
        const Operand o{packed ? (const char*)(scratch + at * steps) : a.x + (first + at) * a.x_row,
                        packed ? 4 : a.x_row,
                        packed ? height * 4 : 4,
                        a.w + p * panel_bytes,
                        panel_bytes,
                        steps,
                        AHEAD,
                        // The next panel comes from memory while this one is at work: half of it
                        // during the first tile, half during the second.
                        a.w + later * panel_bytes + (i & 1) * steps * 64};
        tile_of<T>(height, np, o, sums, np * PANEL, false);
        finish<T>(a, sums, np * PANEL, first + at, height, p * PANEL, np * PANEL);
      }
      p += np;
    }
  }
}

template <class T>
void linear_all(const LinearArgs& a, const Team& team) {
  for (long first = 0; first < a.rows; first += ROW_BLOCK) {
    long rows = a.rows - first < ROW_BLOCK ? a.rows - first : ROW_BLOCK;
    if (first) {
      team.barrier();
      if (team.rank == 0) team.next->store(0);
      team.barrier();
    }
    linear_block<T>(a, team, first, rows);
  }
}

inline void run(const LinearArgs& a, const Team& team) {
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
