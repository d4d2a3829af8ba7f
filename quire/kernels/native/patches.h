// Patches of images: each byte becomes a number of its channel's table, in the place of its patch.
#pragma once
#include "elementwise.h"

constexpr long PIXEL = 3;  // bytes

struct PatchesArgs {
  const uint8_t* pixels;  // [images, depth, height, width, 3]
  long image, frame, row;  // bytes from one to the next; frame is 0 where one fills the depth
  const void* levels;      // [3, 256]
  void* y;  // [images, rows, columns, 3, depth, patch, patch]; patches of a cell follow each other
  long images, rows, columns, depth, patch, merge, bytes;
};

inline Plan plan(const PatchesArgs& a, int) {
  return {a.images * a.rows * a.columns * a.patch * a.patch > SMALL, 0};
}

// One row of a patch, of one channel. Two loads before two stores: fewer waits than one by one.
template <class U>
INLINE void look_up(const uint8_t* p, const U* __restrict levels, U* __restrict y, long n) {
  long i = 0;
  UNROLL for (; i + 2 <= n; i += 2) {
    const U first = levels[p[i * PIXEL]], second = levels[p[(i + 1) * PIXEL]];
    y[i] = first;
    y[i + 1] = second;
  }
  if (i < n) y[i] = levels[p[i * PIXEL]];
}

template <class U>
void patches(const PatchesArgs& a, const Team& team) {
  const long m = a.merge, plane = a.patch * a.patch;
  long from, to;
  team.share(a.images * a.rows, from, to);
  for (long t = from; t < to; t++) {
    const long y = t % a.rows;
    const uint8_t* line = a.pixels + t / a.rows * a.image + y * a.patch * a.row;
    for (long x = 0; x < a.columns; x++) {
      const long before = (t - y % m) * a.columns + x / m * m * m;  // in whole cells
      const uint8_t* corner = line + x * a.patch * PIXEL;
      U* out = (U*)a.y + (before + y % m * m + x % m) * PIXEL * a.depth * plane;
      for (long c = 0; c < PIXEL; c++)
        for (long d = 0; d < a.depth; d++, out += plane)
          if (d > 0 && a.frame == 0)
            memcpy(out, out - plane, plane * sizeof(U));
          else
            for (long i = 0; i < a.patch; i++)
              look_up(corner + c + d * a.frame + i * a.row, (const U*)a.levels + c * 256,
                      out + i * a.patch, a.patch);
    }
  }
}

inline void run(const PatchesArgs& a, const Team& team) {
  a.bytes == 2 ? patches<uint16_t>(a, team) : patches<uint32_t>(a, team);
}
