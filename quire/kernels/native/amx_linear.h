// linear in bf16 by Intel's matrix tiles (AMX), over the panels that all CPUs have.
//
//     C [16 rows][16 columns] fp32  +=  A [16 rows][32 inputs]  .  B [16 steps][16 columns] pairs
//
// A step of a panel is a row of two tiles B. A tile sums the products of even and of odd inputs of
// its 32 apart, in order, and adds both to C. Few rows, which wait for memory, are multiplied by
// vectors in the same order, so a row's bits do not depend on other rows (but for denormal numbers,
// which tiles take for zero).
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, TDPBF16PS.
#pragma once

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

constexpr long AMX_ROWS = 16, AMX_STEPS = 16, AMX_BYTES = 1024;
constexpr long PANEL_BYTES = AMX_STEPS * PANEL * 4;  // of a panel: two tiles
constexpr long A_CACHE = 1 << 20;  // bytes of rows that stay in a cache while panels pass
constexpr long VECTOR_ROWS = 4;    // most rows of a product by vectors

// Whether the system lets this process use tiles; asked once.
inline bool has_tiles() {
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // arch_prctl, see its man page
  static const bool granted = !syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA);
  return granted;
}

INLINE long blocks_of(const LinearArgs& a) {  // of inputs, those of a tile
  return (steps_of(a.inputs, 1) + AMX_STEPS - 1) / AMX_STEPS;
}

// Rows that are packed together. Up to 16 are one tile of so many rows, which each rank packs.
INLINE long packed_rows(const LinearArgs& a) {
  const long fit = A_CACHE / (blocks_of(a) * AMX_STEPS * 4) / 32 * 32;
  const long most = fit < 32 ? 32 : fit > 512 ? 512 : fit;
  return a.rows < most ? a.rows : most;
}

INLINE long group_rows(const LinearArgs& a) { return a.rows < AMX_ROWS ? a.rows : AMX_ROWS; }

INLINE long packed_bytes(const LinearArgs& a) {
  const long groups = (packed_rows(a) + AMX_ROWS - 1) / AMX_ROWS;
  return groups * blocks_of(a) * AMX_BYTES;
}

// Rows as pairs of floats, of which each rank has its own.
INLINE long vector_bytes(const LinearArgs& a) {
  return (a.rows * steps_of(a.inputs, 1) * 8 + 63) / 64 * 64;
}

inline long amx_scratch(const LinearArgs& a, int threads) {
  if (a.rows <= VECTOR_ROWS) return vector_bytes(a) * threads;
  return packed_bytes(a) * (a.rows <= AMX_ROWS ? threads : 1);
}

// Tiles 0 to 3: sums of two groups of rows by the halves of a panel. 4, 5: rows. 6, 7: the halves.
inline void configure_tiles(long rows) {
  alignas(64) uint8_t config[64] = {1};  // palette
  for (int t = 0; t < 8; t++) {
    config[16 + 2 * t] = 64;  // bytes of a row
    config[48 + t] = (uint8_t)(t < 6 ? rows : AMX_STEPS);
  }
  _tile_loadconfig(config);
}

// Sums [MR][NP * 32] of rows by NP panels. x: [steps][MR] pairs of floats.
template <int MR, int NP>
__attribute__((noinline)) void multiply_vectors(const float* x, const char* panels,
                                                long panel_bytes, long steps, float* sums) {
  constexpr int NV = 2 * NP;
  const __m512i high = _mm512_set1_epi32((int)0xffff0000);
  __m512 acc[MR][NV] = {};
  for (long k = 0; k < steps;) {
    const long end = k + AMX_STEPS < steps ? k + AMX_STEPS : steps;
    __m512 even[MR][NV] = {}, odd[MR][NV] = {};
    for (; k < end; k++, x += 2 * MR)
      UNROLL for (int j = 0; j < NV; j++) {
        const char* at = panels + j / 2 * panel_bytes + k * PANEL * 4 + j % 2 * 64;
        const __m512i b = _mm512_loadu_si512(at);
        __builtin_prefetch(at + AHEAD);
        const __m512 first = (__m512)_mm512_slli_epi32(b, 16), second = (__m512)(b & high);
        UNROLL for (int i = 0; i < MR; i++) {
          even[i][j] = _mm512_fmadd_ps(_mm512_set1_ps(x[2 * i]), first, even[i][j]);
          odd[i][j] = _mm512_fmadd_ps(_mm512_set1_ps(x[2 * i + 1]), second, odd[i][j]);
        }
      }
    UNROLL for (int i = 0; i < MR; i++) UNROLL for (int j = 0; j < NV; j++)
      acc[i][j] += even[i][j] + odd[i][j];
  }
  UNROLL for (int i = 0; i < MR; i++) UNROLL for (int j = 0; j < NV; j++)
    _mm512_storeu_ps(sums + i * NP * PANEL + j * 16, acc[i][j]);
}

// All rows, MR of them, by the panels that this rank takes.
template <int MR>
void few_rows(const LinearArgs& a, const Team& team) {
  constexpr int WIDE = MR == 1 ? 4 : MR == 2 ? 2 : 1;  // more streams of memory at once
  const long steps = steps_of(a.inputs, 1), panel_bytes = steps * PANEL * 4;
  float* x = (float*)(team.scratch + team.rank * vector_bytes(a));
  for (int i = 0; i < MR; i++) {
    const uint16_t* row = (const uint16_t*)(a.x + i * a.x_row);
    for (long k = 0; k < a.inputs; k++) {
      const uint32_t bits = (uint32_t)row[k] << 16;
      memcpy(x + (k / 2 * MR + i) * 2 + k % 2, &bits, 4);
    }
    if (a.inputs % 2) x[((steps - 1) * MR + i) * 2 + 1] = 0;
  }
  const long panels = (a.outputs + PANEL - 1) / PANEL;
  const long grain = (65536 / (panel_bytes * WIDE) + 1) * WIDE;
  float sums[MR * WIDE * PANEL];
  for (long p; (p = team.take(grain)) < panels;) {
    const long end = p + grain < panels ? p + grain : panels;
    for (; p + WIDE <= end; p += WIDE) {
      multiply_vectors<MR, WIDE>(x, a.w + p * panel_bytes, panel_bytes, steps, sums);
      finish<bf16>(a, sums, WIDE * PANEL, 0, MR, p * PANEL, WIDE * PANEL);
    }
    for (; p < end; p++) {
      multiply_vectors<MR, 1>(x, a.w + p * panel_bytes, panel_bytes, steps, sums);
      finish<bf16>(a, sums, PANEL, 0, MR, p * PANEL, PANEL);
    }
  }
}

// Rows [first, first + rows) of inputs of block k -> a tile [high][32 inputs], zeros past the ends.
inline void pack_a(const LinearArgs& a, long first, long rows, long high, long k, char* out) {
  const long at = k * 64, left = a.inputs * 2 - at, bytes = left < 64 ? left : 64;
  for (long i = 0; i < high; i++, out += 64) {
    if (i < rows && bytes == 64) {
      memcpy(out, a.x + (first + i) * a.x_row + at, 64);
      continue;
    }
    memset(out, 0, 64);
    if (i < rows) memcpy(out, a.x + (first + i) * a.x_row + at, bytes);
  }
}

// Sums [GROUPS * 16][32] of groups of rows by one panel. last: the panel's last block, whole.
template <int GROUPS>
INLINE void multiply_tiles(const char* rows, long group, long high, const char* panel,
                           const char* last, long blocks, const char* later, float* sums) {
  _tile_zero(0);
  _tile_zero(1);
  if (GROUPS == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (long k = 0; k < blocks; k++) {
    const char *b = k + 1 < blocks ? panel + k * PANEL_BYTES : last, *a = rows + k * high * 64;
    if (later) UNROLL for (int i = 0; i < 32; i++) __builtin_prefetch(later + k * PANEL_BYTES + i * 64);
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b, PANEL * 4);
    _tile_loadd(7, b + 64, PANEL * 4);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (GROUPS == 2) {
      _tile_loadd(5, a + group, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, PANEL * 4);
  _tile_stored(1, sums + 16, PANEL * 4);
  if (GROUPS == 2) {
    _tile_stored(2, sums + AMX_ROWS * PANEL, PANEL * 4);
    _tile_stored(3, sums + AMX_ROWS * PANEL + 16, PANEL * 4);
  }
}

// Rows [first, first + rows), packed at `tiles`, by the panels that this rank takes.
inline void multiply_rows(const LinearArgs& a, const Team& team, const char* tiles, long first,
                          long rows) {
  const long steps = steps_of(a.inputs, 1), blocks = blocks_of(a), high = group_rows(a);
  const long panel_bytes = steps * PANEL * 4, panels = (a.outputs + PANEL - 1) / PANEL;
  const long group = blocks * high * 64, begun = (blocks - 1) * AMX_STEPS;
  const long grain = rows <= AMX_ROWS ? 65536 / panel_bytes + 1 : 1;
  alignas(64) float sums[2 * AMX_ROWS * PANEL];
  alignas(64) char end[PANEL_BYTES] = {};
  for (long p = team.take(grain), after; p < panels; p = after) {
    after = team.take(grain);
    for (long q = p; q < p + grain && q < panels; q++) {
      const char* panel = a.w + q * panel_bytes;
      const char* last = panel + begun * PANEL * 4;
      if (steps % AMX_STEPS) {  // what follows is another panel, or nothing
        memcpy(end, last, (steps - begun) * PANEL * 4);
        last = end;
      }
      for (long i = 0; i < rows; i += 2 * AMX_ROWS) {
        const char* at = tiles + i / AMX_ROWS * group;
        const char* later = i ? nullptr : panel + 4096;
        const bool both = rows - i > AMX_ROWS;
        if (both)
          multiply_tiles<2>(at, group, high, panel, last, blocks, later, sums);
        else
          multiply_tiles<1>(at, group, high, panel, last, blocks, later, sums);
        const long some = rows - i < 2 * AMX_ROWS ? rows - i : 2 * AMX_ROWS;
        finish<bf16>(a, sums, PANEL, first + i, some, q * PANEL, PANEL);
      }
    }
  }
}

inline void amx_linear(const LinearArgs& a, const Team& team) {
  switch (a.rows) {
    case 0: return;
    case 1: return few_rows<1>(a, team);
    case 2: return few_rows<2>(a, team);
    case 3: return few_rows<3>(a, team);
    case 4: return few_rows<4>(a, team);
  }
  const long blocks = blocks_of(a), high = group_rows(a), most = packed_rows(a);
  configure_tiles(high);
  if (a.rows <= AMX_ROWS) {
    char* own = team.scratch + team.rank * packed_bytes(a);
    for (long k = 0; k < blocks; k++) pack_a(a, 0, a.rows, high, k, own + k * high * 64);
    multiply_rows(a, team, own, 0, a.rows);
  } else {
    for (long first = 0; first < a.rows; first += most) {
      const long rows = a.rows - first < most ? a.rows - first : most;
      const long items = (rows + AMX_ROWS - 1) / AMX_ROWS * blocks;
      if (first) {
        team.barrier();
        if (team.rank == 0) team.next->store(0);
        team.barrier();
      }
      long from, to;
      team.share(items, from, to);
      for (long i = from; i < to; i++) {
        const long row = i / blocks * AMX_ROWS;
        pack_a(a, first + row, rows - row, AMX_ROWS, i % blocks, team.scratch + i * AMX_BYTES);
      }
      team.barrier();
      multiply_rows(a, team, team.scratch, first, rows);
    }
  }
  _tile_release();
}
#else
inline bool has_tiles() { return false; }
inline long amx_scratch(const LinearArgs&, int) { return 0; }
inline void amx_linear(const LinearArgs&, const Team&) {}
#endif
