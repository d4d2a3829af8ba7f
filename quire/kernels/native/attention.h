// Attention: a matrix product, an online softmax and a matrix product over chunks of keys. Keys and
// values are in a paged cache (causal), or are the step's own (packed: every token sees all of its
// sequence, or those nearer than the window).
//
//     positions   |-- chunk --|-- chunk --| ... |   CHUNK keys, cut at absolute positions
//                 |-------- segment --------| ...   SEGMENT keys; folded into the row's total in order
//
// Chunks and segments are cut by position, never by what else is in the batch, and masked keys add
// exactly 0: a row's bits are the same in a decode step, in any prompt chunk, on any thread.
// One item = (sequence, tile of queries, kv head); its rows are the tile's queries times the query
// heads that share the kv head, so every key is read once for all of them.
#pragma once
#include "elementwise.h"

constexpr long CHUNK = 64;
constexpr long SEGMENT = 1024;
constexpr long SPREAD = 3;    // larger than 1 / SPREAD of a rank's share: an item is split
constexpr long PACKING = 8;   // to make keys and values ready costs as much as so many rows
constexpr long TILE_ROWS = MAX_ROWS > 6 ? 112 : 192;  // most of an item, unless one query has more

struct AttentionArgs {
  const char* q;
  long q_token, q_head;  // elements
  const char* cache;
  const int32_t *tables, *starts, *contexts;  // packed: no tables; contexts: see context()
  char* y;
  long table_row, sequences, heads, kv_heads, size, block, blocks, dtype, window;
  const float* slopes;    // [heads] of ALiBi, or null
  const float* bias;  // [heads][2 * reach + 1] by distance of the key, cut at reach; or null
  long reach;
  const char *k, *v;  // packed: the step's own keys and values; else null
  long k_token, k_head, v_token, v_head;  // bytes
  long code, head;  // of the cache: its codes, if any; bytes of a head in a block
  Scales scales;    // of its codes; none: they are in `scale` and v_scale
  const int32_t* spans;  // paged: [queries][2], positions each sees besides, or an empty range; or null
  double scale, softcap, v_scale;  // window 0, softcap 0: none

  long row_bytes() const { return size * (code ? 1 : dtype ? 2 : 4); }  // of a cached key

  long queries(long s) const { return starts[s + 1] - starts[s]; }
  // Keys of a sequence. Packed: the first contexts[s] of its own, all if that is 0 or null.
  long context(long s) const {
    if (!k) return contexts[s];
    return contexts && contexts[s] ? contexts[s] : queries(s);
  }
};

struct Shape {  // sizes that follow from the arguments
  long group, queries, rows, steps, width, bytes;
  explicit Shape(const AttentionArgs& a) {
    group = a.heads / a.kv_heads;
    queries = TILE_ROWS / group > 0 ? TILE_ROWS / group : 1;
    rows = queries * group;
    steps = steps_of(a.size, a.dtype);
    width = (a.size + PANEL - 1) / PANEL * PANEL;
    bytes = a.dtype ? 2 : 4;
  }
};

struct Item {
  long sequence, first, count, kv_head;  // queries [first, first + count) of the sequence
  long cuts, cut;                        // into so many pieces, at most; which one of them
};

// The items in order, or if `split` their pieces, a segment each; `seek` only moves forward, so a
// walk over all costs their number.
struct Items {
  const AttentionArgs& a;
  const long queries;
  const bool split;
  long sequence = 0, base = 0;
  Items(const AttentionArgs& a, const Shape& s, bool split)
      : a(a), queries(s.queries), split(split) {}
  long tiles(long s) const { return (a.queries(s) + queries - 1) / queries; }
  long cuts(long s) const {
    const long seen = a.window ? a.context(s) - a.queries(s) - a.window + 1 : 0;
    return (a.context(s) + SEGMENT - 1) / SEGMENT - (seen > 0 ? seen / SEGMENT : 0);
  }
  bool seek(long index, Item& item) {
    for (; sequence < a.sequences; sequence++) {
      const long n = tiles(sequence) * a.kv_heads * (split ? cuts(sequence) : 1);
      if (index < base + n) break;
      base += n;
    }
    if (sequence == a.sequences) return false;
    // The last tile of a prompt sees the most keys: it goes first.
    const long pieces = split ? cuts(sequence) : 1, at = (index - base) / pieces;
    const long tile = tiles(sequence) - 1 - at / a.kv_heads;
    item = {sequence, tile * queries, 0, at % a.kv_heads, pieces, (index - base) % pieces};
    const long left = a.queries(sequence) - item.first;
    item.count = left < queries ? left : queries;
    return true;
  }
};

struct Span {  // positions [low, high) that some row of an item sees
  long low, high, first;  // first: position of the item's first query
};

INLINE Span span_of(const AttentionArgs& a, const Item& item) {
  const long context = a.context(item.sequence);
  const long past = a.k ? 0 : context - a.queries(item.sequence);
  const long first = past + item.first, end = first + item.count;
  const long low = a.window && first - a.window + 1 > 0 ? first - a.window + 1 : 0;
  if (a.spans) {
    Span all{low, end, first};
    const int32_t* own = a.spans + 2 * (a.starts[item.sequence] + item.first);
    for (long i = 0; i < 2 * item.count; i += 2) {
      if (own[i] >= own[i + 1]) continue;
      if (own[i] < all.low) all.low = own[i];
      if (own[i + 1] > all.high) all.high = own[i + 1];
    }
    return all;
  }
  if (!a.k) return {low, end, first};
  return {low, a.window && end + a.window - 1 < context ? end + a.window - 1 : context, first};
}

INLINE long segments_of(const Span& s) {
  return (s.high + SEGMENT - 1) / SEGMENT - s.low / SEGMENT;
}

// What of it is segment number `n`.
INLINE Span segment_of(const Span& s, long n) {
  const long begin = (s.low / SEGMENT + n) * SEGMENT, end = begin + SEGMENT;
  return {begin > s.low ? begin : s.low, end < s.high ? end : s.high, s.first};
}

// Running state of an item's rows: largest score, sum of weights, weighted sum of values.
struct State {
  float *best, *total, *out;
};

template <class T>
struct Buffers {  // one rank's working memory
  T *q, *k, *v, *weights;
  float* scores;
  State part, whole;
  static long bytes(const Shape& s) {
    const long own = s.bytes < 4 ? s.bytes : 0;  // float weights take the place of the scores
    long n = s.rows * (s.steps * 4 + CHUNK * (4 + own) + 2 * (s.width + 2) * 4);
    n += CHUNK * (s.steps * 4 + s.width * s.bytes);
    return (n + 16 * 64 + 4095) / 4096 * 4096;
  }
  Buffers(char* at, const Shape& s) {
    auto cut = [&](long n) {
      char* here = at;
      at += (n + 63) / 64 * 64;
      return here;
    };
    q = (T*)cut(s.rows * s.steps * 4);
    k = (T*)cut(CHUNK * s.steps * 4);
    v = (T*)cut(CHUNK * s.width * s.bytes);
    scores = (float*)cut(s.rows * CHUNK * 4);
    weights = sizeof(T) == 4 ? (T*)scores : (T*)cut(s.rows * CHUNK * s.bytes);
    for (State* state : {&part, &whole}) {
      state->best = (float*)cut(s.rows * 4);
      state->total = (float*)cut(s.rows * 4);
      state->out = (float*)cut(s.rows * s.width * 4);
    }
  }
};

INLINE void reset(const State& s, long rows, long width) {
  for (long i = 0; i < rows; i++) s.best[i] = -INFINITY, s.total[i] = 0;
  memset(s.out, 0, rows * width * 4);
}

alignas(64) const char NOTHING[4096] = {};

// The chunk's keys and values of one kv head, row by row; zeros where there is none to see.
struct Rows {
  const char *at[CHUNK], *values[CHUNK];
  float key_scales[CHUNK], value_scales[CHUNK];  // of codes; 0 where there is none to see

  void none(long i) { at[i] = values[i] = NOTHING, key_scales[i] = value_scales[i] = 0; }

  // Rows of positions [from, to) of the chunk that begins at `start`.
  void find(const AttentionArgs& a, long sequence, long kv_head, long start, long from, long to) {
    const long row = a.row_bytes(), plane = a.kv_heads * a.head;
    const int32_t* table = a.tables + sequence * a.table_row;
    for (long i = 0; i < CHUNK && to - from < CHUNK; i++) none(i);
    if (a.k) {
      const char* k = a.k + (a.starts[sequence] + start) * a.k_token + kv_head * a.k_head;
      const char* v = a.v + (a.starts[sequence] + start) * a.v_token + kv_head * a.v_head;
      for (long i = from - start; i < to - start; i++) {
        at[i] = k + i * a.k_token;
        values[i] = v + i * a.v_token;
      }
      return;
    }
    for (long p = from; p < to;) {
      const long id = table[p / a.block], offset = p % a.block;
      const long n = a.block - offset < to - p ? a.block - offset : to - p;
      if (id >= 0 && id < a.blocks) {  // NO_BLOCK is -1; never read outside the cache
        const char* first = a.cache + id * 2 * plane + kv_head * a.head + offset * row;
        for (long i = 0; i < n; i++) {
          at[p - start + i] = first + i * row;
          values[p - start + i] = first + plane + i * row;
        }
        if (a.scales.first) {
          a.scales.copy(id, kv_head, offset, n, key_scales + p - start);
          a.scales.copy(id, a.kv_heads + kv_head, offset, n, value_scales + p - start);
        }
      } else {
        for (long i = 0; i < n; i++) none(p - start + i);
      }
      p += n;
    }
  }
};

// Asks for the rows that are needed next, keys then values, a few lines at a time: blocks lie all
// over the memory, where no hardware would guess, and few misses can be under way at once. In order
// of address, and slowly: a burst, or another order, was measured to be a third slower.
struct Feed {
  const Rows& rows;
  const long bytes;  // of a row
  long row, at = 0;
  Feed(const Rows& rows, long bytes, bool wanted)
      : rows(rows), bytes(bytes), row(wanted ? 0 : 2 * CHUNK) {}
  INLINE void prefetch(long lines) {
    for (; lines > 0 && row < 2 * CHUNK; lines--) {
      const char* base = row < CHUNK ? rows.at[row] : rows.values[row - CHUNK];
      __builtin_prefetch(base + at, 0, 2);
      at += 64;
      if (at >= bytes) at = 0, row++;
    }
  }
};

// Keys as panels of [steps][32] dwords.
template <class T>
void pack_keys(const Rows& keys, Feed& feed, long count, long size, long steps, T* out) {
  const long whole = size * sizeof(T) / 4, columns = (count + PANEL - 1) / PANEL * PANEL;
  for (long c = 0; c < columns; c += 16) {
    const uint32_t* rows[16];
    for (long i = 0; i < 16; i++) rows[i] = (const uint32_t*)keys.at[c + i];
    uint32_t* panel = (uint32_t*)out + c / PANEL * steps * PANEL + c % PANEL;
    long k = 0;
    for (; k + 16 <= whole; k += 16) {
      transpose16(rows, panel + k * PANEL, PANEL);
      for (auto& row : rows) row += 16;
      feed.prefetch(16);
    }
    for (long left = k; left < whole; left++)
      for (long i = 0; i < 16; i++) panel[left * PANEL + i] = rows[i][left - k];
  }
}

// Keys in codes as the same panels of numbers; their scales come later. Steps of codes that are not
// there end in the next panel, which is written after, or in the values.
template <int CODE, class T>
void pack_key_codes(const Rows& keys, Feed& feed, long count, long size, long steps, T* out) {
  constexpr long per = 4 / sizeof(T);  // numbers in a dword
  const long columns = (count + PANEL - 1) / PANEL * PANEL;
  for (long c = 0; c < columns; c += 16)
    for (long k = 0; k < size; k += 64) {
      const long n = size - k < 64 ? size - k : 64;
      uint32_t turned[16 * 16], last[16][16];
      const uint32_t* rows[16];
      for (long i = 0; i < 16; i++) {
        rows[i] = (const uint32_t*)(keys.at[c + i] + k);
        if (n < 64) rows[i] = (const uint32_t*)memcpy(last[i], rows[i], n);
      }
      transpose16(rows, turned, 16);
      feed.prefetch(16);
      T* to = out + ((c / PANEL * steps + k / per) * PANEL + c % PANEL) * per;
      for (long i = 0; i < n; i += 4, to += 4 * PANEL)
        for (long j = 0; j < 16; j += W) {
          vu raw;
          memcpy(&raw, turned + i * 4 + j, sizeof raw);
          store_four<CODE>(raw, to + j * per, PANEL);
        }
    }
}

// Values of the chunk as panels of [CHUNK / per][32] dwords over the head's channels.
INLINE void pair_values(const bf16* a, const bf16* b, bf16* out, long n) {
#if defined(__AVX512BW__)
  if (n == PANEL) {
    const __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
    alignas(64) static const struct Order {
      uint16_t low[32], high[32];
      constexpr Order() : low(), high() {
        for (int i = 0; i < 16; i++) {
          low[2 * i] = i, low[2 * i + 1] = 32 + i;
          high[2 * i] = 16 + i, high[2 * i + 1] = 48 + i;
        }
      }
    } order;
    _mm512_storeu_si512(out, _mm512_permutex2var_epi16(x, _mm512_load_si512(order.low), y));
    _mm512_storeu_si512(out + 32, _mm512_permutex2var_epi16(x, _mm512_load_si512(order.high), y));
    return;
  }
#elif defined(__SSE2__)
  if (n == PANEL) {
    UNROLL for (long i = 0; i < PANEL; i += 8) {
      const __m128i x = _mm_loadu_si128((const __m128i*)(a + i));
      const __m128i y = _mm_loadu_si128((const __m128i*)(b + i));
      _mm_storeu_si128((__m128i*)(out + 2 * i), _mm_unpacklo_epi16(x, y));
      _mm_storeu_si128((__m128i*)(out + 2 * i) + 1, _mm_unpackhi_epi16(x, y));
    }
    return;
  }
#endif
  for (long i = 0; i < PANEL; i++) {
    out[2 * i] = i < n ? a[i] : bf16{0};
    out[2 * i + 1] = i < n ? b[i] : bf16{0};
  }
}

INLINE void panel_values(const Rows& keys, long p, long column, long n, bf16* out) {
  pair_values((const bf16*)keys.values[p] + column, (const bf16*)keys.values[p + 1] + column, out, n);
}

INLINE void panel_values(const Rows& keys, long p, long column, long n, float* out) {
  const float* from = (const float*)keys.values[p] + column;
  if (n == PANEL) {
    UNROLL for (long i = 0; i < PANEL; i += W) store(out + i, load(from + i));
    return;
  }
  memset(out, 0, PANEL * 4);
  memcpy(out, from, n * 4);
}

template <class T>
void pack_values(const Rows& keys, Feed& feed, long count, long size, T* out) {
  const long per = 4 / sizeof(T), end = (count + per - 1) / per;
  for (long column = 0; column < size; column += PANEL) {
    const long n = size - column < PANEL ? size - column : PANEL;
    for (long step = 0; step < end; step++) {
      feed.prefetch(2);
      panel_values(keys, step * per, column, n,
                   out + (column * CHUNK / per + step * PANEL) * per);
    }
  }
}

// Values in codes as the same panels.
template <int CODE, class T>
void pack_value_codes(const Rows& keys, Feed& feed, long count, long size, T* out) {
  constexpr long per = 4 / sizeof(T);
  for (long column = 0; column < size; column += PANEL) {
    const long n = size - column < PANEL ? size - column : PANEL;
    T* to = out + column * CHUNK;
    for (long p = 0; p < count; p += 4, to += 4 * PANEL) {
      const char* rows[4];
      char last[4][PANEL] = {};
      for (long i = 0; i < 4; i++) {
        rows[i] = keys.values[p + i] + column;
        if (n < PANEL) rows[i] = (const char*)memcpy(last[i], rows[i], n);
      }
      feed.prefetch(2);
      vu raw[PV];
      interleave(rows, raw);
      UNROLL for (int j = 0; j < PV; j++) store_four<CODE>(raw[j], to + j * W * per, PANEL);
    }
  }
}

// y[rows][panels * 32] (+)= a[rows][steps] . b
template <class T>
void product(const char* a, long a_row, long rows, const char* b, long panel_bytes, long panels,
             long steps, float* y, long stride, bool add) {
  const Tiles<T> tiles(rows);
  const int wide = panels_at_once((int)(tiles.height + (tiles.taller > 0)));
  for (long p = 0; p < panels;) {
    const int np = p + wide <= panels ? wide : p + 2 <= panels && wide >= 2 ? 2 : 1;
    const Operand o{a, a_row, 4, 0, b + p * panel_bytes, panel_bytes, steps, 0, b};
    tiles.product(np, o, false, y + p * PANEL, stride, add);
    p += np;
  }
}

struct Mask {  // columns [low, high) of the chunk that a row sees; `own` is that of its token
  long low, high, own;
};

// The bias of columns [0, columns) for a query at column `own`: of the table, or copied to `space`.
INLINE const float* bias_line(const AttentionArgs& a, long head, long own, long columns,
                              float* space) {
  const float* row = a.bias + head * (2 * a.reach + 1) + a.reach;
  if (own <= a.reach && columns - 1 - own <= a.reach) return row - own;
  for (long c = 0; c < columns; c++) {
    const long distance = c - own;
    space[c] = row[distance < -a.reach ? -a.reach : distance > a.reach ? a.reach : distance];
  }
  return space;
}

// Scores of a row -> weights; rescales what the row has so far. `columns`: a multiple of 32.

template <class T>
INLINE void soften(const AttentionArgs& a, const Rows& keys, long head, const float* bias,
                   float* scores, T* weights,
                   long columns, Mask mask, float& best, float& total, float* out, long width) {
  const vi lane = lanes();
  const bool masked = mask.low > 0 || mask.high < columns;
  vf most = splat(-INFINITY);
  for (long c = 0; c < columns; c += W) {
    vf s = load(scores + c) * (float)a.scale;
    if (a.scales.first) s = s * load(keys.key_scales + c);
    if (a.softcap) s = (float)a.softcap * vtanh(s / (float)a.softcap);
    if (a.slopes) {
      const vi ahead = lane + (int)(c - mask.own);
      s = s - a.slopes[head] * __builtin_convertvector(ahead < 0 ? -ahead : ahead, vf);
    }
    if (bias) s = s + load(bias + c);
    if (masked) {
      const vi at = lane + (int)c;
      s = pick((at >= (int)mask.low) & (at < (int)mask.high), s, splat(-INFINITY));
    }
    store(scores + c, s);
    most = vmax(most, s);
  }
  const float top = largest(most), now = top > best ? top : best;
  const float base = now == -INFINITY ? 0 : now;
  vf sums{};
  for (long c = 0; c < columns; c += W) {
    const vf w = vexp_negative(load(scores + c) - base);
    sums = sums + w;
    store(weights + c, a.scales.first ? w * load(keys.value_scales + c) : w);
  }
  if (now != best && best > -INFINITY) {  // else there is nothing yet, and 0 * 0 = 0
    const float shrink = vexp(splat(best - base))[0];
    total *= shrink;
    for (long i = 0; i < width; i += W) store(out + i, load(out + i) * shrink);
  }
  total += sum(sums);
  best = now;
}

// whole = whole (+) part: the same formula whether the parts come one by one or all at the end.
INLINE void fold(const State& whole, const State& part, long rows, long width) {
  for (long i = 0; i < rows; i++) {
    const float now = part.best[i] > whole.best[i] ? part.best[i] : whole.best[i];
    const float base = now == -INFINITY ? 0 : now;
    const float old = vexp(splat(whole.best[i] - base))[0];
    const float add = vexp(splat(part.best[i] - base))[0];
    whole.best[i] = now;
    whole.total[i] = whole.total[i] * old + part.total[i] * add;
    float* out = whole.out + i * width;
    for (long c = 0; c < width; c += W)
      store(out + c, load(out + c) * old + load(part.out + i * width + c) * add);
  }
}

template <class T>
struct Worker {
  const AttentionArgs& a;
  const Shape& s;
  Buffers<T> buffers;
  Rows keys = {}, later = {};
  Item after = {};  // what this rank does next; count 0 if nothing

  void copy_queries(const Item& item) {
    const long rows = item.count * s.group, start = a.starts[item.sequence] + item.first;
    for (long i = 0; i < rows; i++) {
      const long token = start + i / s.group, head = item.kv_head * s.group + i % s.group;
      memcpy((char*)buffers.q + i * s.steps * 4,
             (const T*)a.q + token * a.q_token + head * a.q_head, a.size * sizeof(T));
    }
  }

  // The rows this rank needs next: the item's next chunk, or the first of the next item.
  bool find_later(const Item& item, const Span& span, long start) {
    if (start < span.high) {
      const long to = start + CHUNK < span.high ? start + CHUNK : span.high;
      later.find(a, item.sequence, item.kv_head, start, start, to);
    } else if (after.count) {
      Span next = span_of(a, after);
      if (after.cuts > 1) next = segment_of(next, after.cut);
      const long first = next.low / CHUNK * CHUNK;
      const long to = first + CHUNK < next.high ? first + CHUNK : next.high;
      later.find(a, after.sequence, after.kv_head, first, next.low, to);
    } else {
      return false;
    }
    return true;
  }

  template <int CODE>
  void pack_codes(Feed& feed, long count) {
    pack_key_codes<CODE>(keys, feed, count, a.size, s.steps, buffers.k);
    pack_value_codes<CODE>(keys, feed, count, a.size, buffers.v);
  }

  void chunk(const Item& item, const Span& span, long start) {
    const long from = span.low > start ? span.low : start;
    const long to = span.high < start + CHUNK ? span.high : start + CHUNK;
    const long rows = item.count * s.group, panels = (to - start + PANEL - 1) / PANEL;
    const long per = 4 / sizeof(T);
    // Early queries of the tile may end before this chunk: they would only add zeros.
    const bool late = start > span.first && !a.k && !a.spans;
    const long skip = (late ? start - span.first : 0) * s.group;
    if (skip >= rows) return;
    keys.find(a, item.sequence, item.kv_head, start, from, to);
    // Short rows are read faster than they are asked for; many rows hide what they wait for.
    const long bytes = a.k ? a.size * (long)sizeof(T) : a.row_bytes();
    const bool wanted = rows <= (bytes >= 128 ? 64 : 16) && find_later(item, span, start + CHUNK);
    Feed feed(later, bytes, wanted);
    switch (a.code) {
      case INT8: pack_codes<INT8>(feed, to - start); break;
      case E4M3: pack_codes<E4M3>(feed, to - start); break;
      case E5M2: pack_codes<E5M2>(feed, to - start); break;
      default:
        pack_keys(keys, feed, to - start, a.size, s.steps, buffers.k);
        pack_values(keys, feed, to - start, a.size, buffers.v);
    }
    feed.prefetch(2 * CHUNK * bytes);  // what a short chunk had no time for
    product<T>((const char*)buffers.q + skip * s.steps * 4, s.steps * 4, rows - skip,
               (const char*)buffers.k, s.steps * PANEL * 4, panels, s.steps,
               buffers.scores + skip * CHUNK, CHUNK, false);
    for (long i = skip; i < rows; i++) {
      const long position = span.first + i / s.group;
      long low = a.window ? position - a.window + 1 - start : 0;
      const long ahead = a.window && a.k ? position + a.window : to;
      long seen = !a.k ? position + 1 : ahead < to ? ahead : to;
      if (a.spans) {
        const int32_t* own = a.spans + 2 * (a.starts[item.sequence] + item.first + i / s.group);
        if (own[0] < own[1]) {
          if (own[0] - start < low) low = own[0] - start;
          if (own[1] > seen) seen = own[1];
        }
      }
      const Mask mask{low > from - start ? low : from - start, seen - start, position - start};
      const long head = item.kv_head * s.group + i % s.group;
      float space[CHUNK];
      const float* bias = a.bias ? bias_line(a, head, mask.own, panels * PANEL, space) : nullptr;
      soften(a, keys, head, bias, buffers.scores + i * CHUNK,
             buffers.weights + i * CHUNK, panels * PANEL, mask, buffers.part.best[i],
             buffers.part.total[i], buffers.part.out + i * s.width, s.width);
    }
    product<T>((const char*)(buffers.weights + skip * CHUNK), CHUNK * sizeof(T), rows - skip,
               (const char*)buffers.v, CHUNK / per * PANEL * 4, s.width / PANEL,
               (to - start + per - 1) / per, buffers.part.out + skip * s.width, s.width, true);
  }

  // The item's rows over [part.low, part.high) of its span -> buffers.part
  void segment(const Item& item, const Span& span, const Span& part) {
    reset(buffers.part, item.count * s.group, s.width);
    for (long start = part.low / CHUNK * CHUNK; start < part.high; start += CHUNK)
      chunk(item, span, start);
  }

  void write(const Item& item, const State& state) {
    const long token = a.starts[item.sequence] + item.first;
    for (long i = 0; i < item.count * s.group; i++) {
      const long row = (token + i / s.group) * a.heads + item.kv_head * s.group + i % s.group;
      // padding: nothing seen
      const float scale = state.total[i] > 0 ? (float)a.v_scale / state.total[i] : 0;
      T* y = (T*)a.y + row * a.size;
      each(a.size, [&](long c, long n) {
        put(y + c, get(state.out + i * s.width + c, n) * scale, n);
      });
    }
  }

  void whole_item(const Item& item) {
    const Span span = span_of(a, item);
    const long rows = item.count * s.group, segments = segments_of(span);
    copy_queries(item);
    if (segments == 1) {  // folding it into nothing would change no bit
      segment(item, span, span);
      return write(item, buffers.part);
    }
    reset(buffers.whole, rows, s.width);
    for (long n = 0; n < segments; n++) {
      segment(item, span, segment_of(span, n));
      fold(buffers.whole, buffers.part, rows, s.width);
    }
    write(item, buffers.whole);
  }
};

struct Load {  // how much there is to do
  long pieces = 0;
  double work = 0;
  bool split = false;  // one item would keep a rank when the others are done: its segments are shared
  Load(const AttentionArgs& a, const Shape& s, int threads) {
    const Items items(a, s, true);
    double all = 0, most = 0;
    for (long i = 0; i < a.sequences; i++) {
      const long rows = a.queries(i), n = items.tiles(i) * a.kv_heads, cuts = items.cuts(i);
      if (rows <= 0) continue;
      pieces += n * cuts;
      const long high = rows < s.queries ? rows : s.queries;
      const double one = (double)cuts * (PACKING + high * s.group);
      all += n * one;
      if (cuts > 2 && one > most) most = one;
      work += (double)rows * a.context(i);
    }
    work *= a.heads * a.size;
    split = threads > 1 && most * SPREAD * threads > all;
  }
};

// Floats of one stored part: best, total, out of every row.
INLINE long part_floats(const Shape& s) { return s.rows * (s.width + 2); }

INLINE long buffer_bytes(const AttentionArgs& a, const Shape& s) {
  return a.dtype ? Buffers<bf16>::bytes(s) : Buffers<float>::bytes(s);
}

inline Plan plan(const AttentionArgs& a, int threads) {
  const Shape s(a);
  const Load load(a, s, threads);
  const long parts = load.split ? load.pieces * part_floats(s) * 4 : 0;
  return {load.work > 32768, threads * buffer_bytes(a, s) + parts};
}

template <class T>
void attend_split(const AttentionArgs& a, const Team& team, const Shape& s) {
  Worker<T> worker{a, s, Buffers<T>(team.scratch + team.rank * buffer_bytes(a, s), s)};
  float* parts = (float*)(team.scratch + team.size * buffer_bytes(a, s));
  auto state = [&](long piece) {
    float* at = parts + piece * part_floats(s);
    return State{at, at + s.rows, at + 2 * s.rows};
  };
  const State own = worker.buffers.part;
  Items items(a, s, true);
  Item item;
  long u = team.take(1), next;
  for (bool more = items.seek(u, item); more; item = worker.after, u = next) {
    more = items.seek(next = team.take(1), worker.after);
    if (!more) worker.after.count = 0;
    const Span span = span_of(a, item);
    const long segments = segments_of(span);
    if (item.cut >= segments) continue;
    const Span part = segment_of(span, item.cut);
    worker.copy_queries(item);
    worker.buffers.part = segments == 1 ? own : state(u);
    worker.segment(item, part, part);
    if (segments == 1) worker.write(item, own);
  }
  worker.buffers.part = own;
  team.barrier();
  Items again(a, s, true);
  long turn = 0;
  for (u = 0; again.seek(u, item); u += item.cuts) {
    const long rows = item.count * s.group, segments = segments_of(span_of(a, item));
    if (segments == 1 || turn++ % team.size != team.rank) continue;
    reset(worker.buffers.whole, rows, s.width);
    for (long n = 0; n < segments; n++) fold(worker.buffers.whole, state(u + n), rows, s.width);
    worker.write(item, worker.buffers.whole);
  }
}

template <class T>
void attend(const AttentionArgs& a, const Team& team) {
  const Shape s(a);
  const Load load(a, s, team.size);
  if (load.split) return attend_split<T>(a, team, s);
  Worker<T> worker{a, s, Buffers<T>(team.scratch + team.rank * buffer_bytes(a, s), s)};
  Items items(a, s, false);
  Item item;
  for (bool more = items.seek(team.take(1), item); more; item = worker.after) {
    more = items.seek(team.take(1), worker.after);
    if (!more) worker.after.count = 0;
    worker.whole_item(item);
  }
}

inline void run(const AttentionArgs& a, const Team& team) {
  a.dtype ? attend<bf16>(a, team) : attend<float>(a, team);
}
